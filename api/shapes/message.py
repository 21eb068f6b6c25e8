"""One message of a chat, and one tool, as OpenAI's clients send them."""

from typing import Annotated, Any, Final, Literal

from pydantic import Field, field_validator

from api.errors import Unsupported
from api.shapes.body import Body, Items
from api.shapes.breakpoints import CacheControl, Marked

SYSTEM_ROLES: Final = ("system", "developer")
_IMAGES: Final = frozenset({"image", "image_url", "input_image"})
_UNSERVED: Final = {
    "function_call": "send tool_calls",
    "audio": "send what was said as content",
}


class Function(Body):
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.:-]{1,128}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None  # a JSON schema
    strict: bool | None = None
    cache_control: CacheControl | None = None  # in LiteLLM's form


class FunctionTool(Body):
    """A tool of a chat, which the client runs."""

    type: str = "function"
    function: Function
    cache_control: CacheControl | None = None

    @field_validator("type")
    @classmethod
    def _is_clients(cls, kind: str) -> str:
        if kind != "function":
            raise ValueError("this server runs no tools of its own, give those of type 'function'")
        return kind

    @property
    def mark(self) -> CacheControl | None:
        return self.cache_control or self.function.cache_control


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


def text_only(kind: object, where: str) -> Unsupported:
    """What a part or block of this type, at the path `where` of a body, is answered with: an engine
    that takes token ids reads neither images nor all else that is no text."""
    advice = "send what it says as text"
    if kind in _IMAGES:
        advice = "serve a model that reads images with an engine at a URL (docs/vllm.md)"
    return Unsupported(
        f"{where} is of type {str(kind)[:40]!r}; this model reads text only. To use it, {advice}.",
        param=where,
    )
