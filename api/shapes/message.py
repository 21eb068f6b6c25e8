"""One message of a chat and one tool, as OpenAI's clients send them, and the marks on them.

A mark asks to keep the prompt up to and including its part, for a time. Several protocols share
its forms. `api.requests.retention` keeps what is marked.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal, Self

from pydantic import ConfigDict, Field, field_validator, model_validator

from api.errors import Unsupported
from api.shapes.body import Body, Items

SYSTEM_ROLES: Final = ("system", "developer")
_IMAGES: Final = frozenset({"image", "image_url", "input_image"})
_UNSERVED: Final = {"function_call": "send tool_calls", "audio": "send what was said as content"}

Ttl = Literal["5m", "30m", "1h", "12h", "24h"]
TTL_S: Final = {"5m": 300.0, "30m": 1800.0, "1h": 3600.0, "12h": 43_200.0, "24h": 86_400.0}
WRITES_MOST: Final = 4  # breakpoints of one request that are kept, as at OpenAI and Anthropic


class CacheControl(Body):
    """Anthropic's, also on a chat's parts in Qwen's and OpenRouter's form."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None

    @property
    def for_s(self) -> float:
        return TTL_S[self.ttl or "5m"]


class CacheBreakpoint(Body):
    """OpenAI's `prompt_cache_breakpoint` of a part. Its `ttl` goes before that of the options."""

    model_config = ConfigDict(extra="forbid")  # a mistyped ttl would be another price

    mode: Literal["explicit"]
    ttl: Ttl | None = None


class CacheOptions(Body):
    """OpenAI's `prompt_cache_options`.

    `implicit` keeps the whole prompt too. `explicit` keeps only what parts mark, and without a mark
    the request does not use the cache.
    """

    model_config = ConfigDict(extra="forbid")

    mode: Literal["implicit", "explicit"] | None = None
    ttl: Ttl | None = None
    comparison_response_id: None = None  # refused
    prewarm: Literal[False] | None = None  # a cache by name does that

    @field_validator("comparison_response_id", mode="before")
    @classmethod
    def _compares_nothing(cls, name: object) -> None:
        if name is not None:
            raise ValueError("not served: GET /v1/cache/requests/ID says why a prompt missed")

    @property
    def for_s(self) -> float:
        return TTL_S[self.ttl or "30m"]

    def use_cache(self, points: Sequence["Breakpoint"]) -> bool:
        return self.mode != "explicit" or bool(points)


class Marked(Body):
    """A part or message that may end a prefix to keep. At most one of the two marks is given."""

    cache_control: CacheControl | None = None
    prompt_cache_breakpoint: CacheBreakpoint | None = None

    @model_validator(mode="after")
    def _one_mark(self) -> Self:
        if self.cache_control is not None and self.prompt_cache_breakpoint is not None:
            raise ValueError("cache_control and prompt_cache_breakpoint say the same: send one")
        return self

    def keep_s(self, options: CacheOptions) -> float | None:
        """How long to keep the prompt up to here; None without a mark."""
        if self.cache_control is not None:
            return self.cache_control.for_s
        point = self.prompt_cache_breakpoint
        if point is None:
            return None
        return TTL_S[point.ttl] if point.ttl else options.for_s


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
        return "".join(self._part_text(part, number, at) for at, part in enumerate(self.content))

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


@dataclass(frozen=True, slots=True)
class Breakpoint:
    """A point of a chat: after `messages` messages and `parts` parts of the last (0: all)."""

    for_s: float
    messages: int
    parts: int = 0

    def ends_before(self, other: "Breakpoint") -> bool:
        """Whether the other is of a later message and lasts as long."""
        return self.messages < other.messages and self.for_s <= other.for_s


def marked_points(
    messages: Sequence[Message],
    tools: Sequence[FunctionTool],
    num_system: int,
    options: CacheOptions,
) -> Iterator[Breakpoint]:
    """The points that a chat's tools, parts and messages mark, in order.

    Templates put tools before, within or after the text of the first `num_system` messages, the
    system's, so it is kept too.
    """
    for tool in tools:
        if tool.mark is not None:
            yield Breakpoint(tool.mark.for_s, num_system)
    for number, message in enumerate(messages, 1):
        parts = message.content if isinstance(message.content, list) else []
        for place, part in enumerate(parts, 1):
            if (for_s := part.keep_s(options)) is not None:
                yield Breakpoint(for_s, number, place)
        if (for_s := message.keep_s(options)) is not None:
            yield Breakpoint(for_s, number)


def mark_of(part: Mapping[str, Any]) -> dict[str, Any]:
    """The mark of a part that is not checked yet, to be put on its translation."""
    names = ("cache_control", "prompt_cache_breakpoint")
    return {name: part[name] for name in names if part.get(name) is not None}
