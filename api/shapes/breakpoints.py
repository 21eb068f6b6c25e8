"""Where a client asks to keep a prompt, and for how long; the fields that several protocols share.

A mark is on a part of a message. The prompt up to and including that part is pinned after the
request. `api.requests.retention` keeps it.
"""

from collections.abc import Mapping
from typing import Any, Final, Literal, Self

from pydantic import ConfigDict, field_validator, model_validator

from api.shapes.body import Body

Ttl = Literal["5m", "30m", "1h", "12h", "24h"]
TTL_S: Final[Mapping[str, float]] = {
    "5m": 300.0,
    "30m": 1800.0,
    "1h": 3600.0,
    "12h": 43_200.0,
    "24h": 86_400.0,
}
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


def mark_of(part: Mapping[str, Any]) -> dict[str, Any]:
    """The mark of a part that is not checked yet, to be put on its translation."""
    return {
        name: part[name]
        for name in ("cache_control", "prompt_cache_breakpoint")
        if part.get(name) is not None
    }
