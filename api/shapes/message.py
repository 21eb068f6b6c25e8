"""One message of a chat, as OpenAI's clients send it."""

from typing import Any, Final, Literal

from api.errors import Unsupported
from api.shapes.body import Items
from api.shapes.breakpoints import Marked
from api.shapes.images import text_only

SYSTEM_ROLES: Final = ("system", "developer")
_UNSERVED: Final = {
    "function_call": "send tool_calls",
    "audio": "send what was said as content",
}


class ContentPart(Marked):
    type: str
    text: str | None = None
    refusal: str | None = None


class Message(Marked):
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | Items[ContentPart] | None = None
    name: str | None = None
    tool_calls: Items[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None  # of an assistant's turn without content
    function_call: dict[str, Any] | None = None  # refused
    audio: dict[str, Any] | None = None  # refused
    prefix: bool | None = None  # DeepSeek's: the answer continues this last message
    partial: bool | None = None  # Qwen's and Kimi's name for the same

    def text(self, number: int) -> str:
        """The content as one string. Raises for parts other than text, by position."""
        if self.content is None or isinstance(self.content, str):
            return self.content or self.refusal or ""
        return "".join(
            self._part_text(part, number, place) for place, part in enumerate(self.content)
        )

    def _part_text(self, part: ContentPart, number: int, place: int) -> str:
        if self.role == "assistant" and part.type == "refusal" and part.refusal is not None:
            return part.refusal
        if part.type != "text" or part.text is None:
            raise text_only(part.type, f"messages[{number}].content[{place}]")
        return part.text

    def for_template(self, number: int) -> dict[str, Any]:
        """The message as chat templates expect it: `developer` becomes `system`."""
        for name, advice in _UNSERVED.items():
            if getattr(self, name) is not None:
                where = f"messages[{number}].{name}"
                raise Unsupported(f"{where} is not served; {advice}.", param=where)
        plain: dict[str, Any] = {
            "role": "system" if self.role == "developer" else self.role,
            "content": self.text(number),
        }
        for name in ("name", "tool_calls", "tool_call_id", "reasoning_content"):
            if (value := getattr(self, name)) is not None:
                plain[name] = value
        return plain
