"""What engines elsewhere say of a request's tokens, in our disjoint classes. Pure.

`SHAPES` is the one table of the fields in use. Some prompts include what was cached or written,
others leave it out. A count that is missing, no whole number, or contradicts another is not
guessed: it is None.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from billing.usage import Usage
from tiers.tier import TierName

MAX_COUNT: Final = 1 << 40  # a larger count is none
CACHED_HEADER: Final = "fireworks-cached-prompt-tokens"


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The fields of one family, as dotted paths in `usage`. `prompt` tells that it is this one.

    Of the paths to one count, those that are there must agree. `includes`: the prompt counts what
    was cached and what was written; else it counts neither.
    """

    prompt: str
    output: str
    cached: tuple[str, ...]
    written: tuple[str, ...] = ()
    written_1h: tuple[str, ...] = ()
    tiers: str = ""  # the hits by tier, as we tell them ourselves
    missed: str = ""  # the rest of the prompt
    total: str = ""
    thoughts: str = ""  # output that some do not count in `output`, but in `total`
    includes: bool = True


_OPENAI = Shape(
    prompt="prompt_tokens",
    output="completion_tokens",
    cached=(
        "prompt_tokens_details.cached_tokens",  # OpenAI, vLLM, SGLang, OpenRouter, Gemini, ours
        "prompt_token_details.cached_tokens",  # Mistral, beside the others
        "num_cached_tokens",  # Mistral
        "prompt_cache_hit_tokens",  # DeepSeek
        "cached_tokens",  # Moonshot
        "cache_read_input_tokens",  # LiteLLM before Anthropic
        "timings.cache_n",  # llama-server
        CACHED_HEADER,  # Fireworks
    ),
    written=(
        "prompt_tokens_details.cache_write_tokens",  # OpenAI, OpenRouter, ours
        "prompt_tokens_details.created_cache_tokens",  # vLLM
        "prompt_tokens_details.cache_creation_tokens",  # LiteLLM
        "prompt_tokens_details.cache_creation_input_tokens",  # Qwen
        "cache_creation_input_tokens",  # LiteLLM before Anthropic
    ),
    written_1h=(
        "prompt_tokens_details.cache_write_tokens_details.explicit_1h",  # ours
        "prompt_tokens_details.cache_creation_token_details.ephemeral_1h_input_tokens",  # LiteLLM
        "prompt_tokens_details.cache_creation.ephemeral_1h_input_tokens",  # Qwen
    ),
    tiers="prompt_tokens_details.cached_tokens_details",
    missed="prompt_cache_miss_tokens",
    total="total_tokens",
    thoughts="completion_tokens_details.reasoning_tokens",
)
_RESPONSES = Shape(
    prompt="input_tokens",
    output="output_tokens",
    cached=("input_tokens_details.cached_tokens",),
    written=("input_tokens_details.cache_write_tokens",),
    written_1h=("input_tokens_details.cache_write_tokens_details.explicit_1h",),
    tiers="input_tokens_details.cached_tokens_details",
    total="total_tokens",
    thoughts="output_tokens_details.reasoning_tokens",
)
_ANTHROPIC = Shape(
    prompt="input_tokens",
    output="output_tokens",
    cached=("cache_read_input_tokens",),
    written=("cache_creation_input_tokens",),
    written_1h=("cache_creation.ephemeral_1h_input_tokens",),
    tiers="cache_read_input_tokens_details",
    includes=False,
)
_LLAMA = Shape(  # llama-server without usage
    prompt="timings.prompt_n",
    output="timings.predicted_n",
    cached=("timings.cache_n",),
    includes=False,
)
SHAPES: Final = (_OPENAI, _LLAMA)  # those with a prompt's field of their own
# Calls of a model that Anthropic lists in `iterations` alone: its other counts have the rest.
LISTED_ALONE: Final = ("compaction", "advisor_message")


@dataclass(frozen=True, slots=True)
class Counted:
    """What is known of a request's tokens. Of the misses, `written` were kept in the cache, and of
    these `written_1h` for an hour. None: nothing that can be believed was said."""

    prompt: int | None = None
    hits: Mapping[TierName, int] | None = None
    written: int = 0
    written_1h: int = 0
    output: int | None = None


NOTHING: Final = Counted()


@dataclass(slots=True)
class UsageReader:
    """Reads the usage in the events of one answer, or in its body. The last one counts; nothing is
    added up.

    With `is_partial`, as in Messages, an event has a part of the counts and replaces those before.
    Otherwise a second prompt count that differs from the first contradicts it, and so does an
    output that shrinks.
    """

    is_partial: bool = False
    cached: str = ""  # by `CACHED_HEADER`
    _said: dict[str, Any] = field(default_factory=dict)
    _counted: Counted = NOTHING
    _contradicts: bool = False

    def read(self, document: Mapping[str, Any]) -> bool:
        """Takes in what an event or a body says. Returns whether it says anything."""
        said = _usage_in(document)
        if not said:
            return False
        if self.cached.isdecimal():
            said[CACHED_HEADER] = int(self.cached[:19])
        if self.is_partial:
            self._said |= {name: value for name, value in said.items() if value is not None}
            self._counted = counted(self._said, excludes=True)
            return True
        now, before = counted(said), self._counted
        if self._said and before.prompt != 0:  # some say zeros until the end
            shrinks = now.output is None or now.output < (before.output or 0)
            fewer = now.hits != before.hits and None not in (now.hits, before.hits)
            self._contradicts |= now.prompt != before.prompt or shrinks or fewer
        self._said, self._counted = dict(said), now
        return True

    @property
    def counted(self) -> Counted:
        return NOTHING if self._contradicts else self._counted


def counted(said: Mapping[str, Any], *, excludes: bool = False) -> Counted:
    """A usage object in our classes. `excludes`: it comes in Anthropic's protocol, so that its
    `input_tokens` count neither reads nor writes."""
    shape = _shape_of(said, excludes)
    if shape is None:
        return NOTHING
    calls = said.get("iterations") if shape is _ANTHROPIC else None
    found = [each for each in calls if isinstance(each, Mapping)] if isinstance(calls, list) else []
    if listed := [each for each in found if each.get("type") in LISTED_ALONE]:
        rest = {**said, "iterations": None}
        return _sum([counted(each, excludes=True) for each in (rest, *listed)])
    try:
        prompt = _one(said, (shape.prompt,))
        output = _output(said, shape, prompt)
        if prompt is None:
            return Counted(output=output)
    except ValueError:
        return NOTHING
    try:
        return _classes(said, shape, prompt, output)
    except ValueError:  # what was cached cannot be; what the prompt has may be known all the same
        return Counted(prompt=prompt if shape.includes else None, output=output)


def billed(
    seen: Counted, *, most_prompt: int, sent: int, most_output: int, is_whole: bool
) -> Usage:
    """The usage to bill.

    An unreported prompt is a miss of what the body could be at most, an unreported hit a miss.
    Unreported output is the tokens that were `sent` at least, and so is that of an answer cut off:
    what was told may be of its beginning. Neither exceeds what is held.
    """
    prompt, hits, told = seen.prompt, seen.hits, seen.output
    if not (told and is_whole):
        told = sent and max(told or 0, sent)
    output = min(told, most_output)
    if prompt is None or not 0 < prompt <= most_prompt:
        return Usage(miss=most_prompt, unreported=most_prompt, output=output)
    if hits is None:
        return Usage(miss=prompt, unreported=prompt, output=output)
    return Usage(
        **{f"hit_{tier}": tokens for tier, tokens in hits.items()},
        miss=prompt - sum(hits.values()),
        output=output,
        cache_write=seen.written - seen.written_1h,
        cache_write_1h=seen.written_1h,
    )


def _shape_of(said: Mapping[str, Any], excludes: bool) -> Shape | None:
    found = next((shape for shape in SHAPES if _at(said, shape.prompt) is not None), None)
    if found is not None or _at(said, "input_tokens") is None:
        return found
    anthropic = (*_ANTHROPIC.cached, *_ANTHROPIC.written)
    return _ANTHROPIC if excludes or any(name in said for name in anthropic) else _RESPONSES


def _classes(said: Mapping[str, Any], shape: Shape, prompt: int, output: int | None) -> Counted:
    """Raises ValueError for counts of the cache that contradict each other."""
    cached, written = _one(said, shape.cached), _one(said, shape.written) or 0
    written_1h = _one(said, shape.written_1h) or 0
    if not shape.includes:
        prompt += (cached or 0) + written
    rest = prompt - (cached or 0)
    if written > rest or written_1h > written:
        raise ValueError
    if shape.missed and _one(said, (shape.missed,)) not in (None, rest):
        raise ValueError
    if cached is None:
        return Counted(prompt, None, 0, 0, output)
    return Counted(prompt, _by_tier(said, shape, cached), written, written_1h, output)


def _sum(calls: Sequence[Counted]) -> Counted:
    """Of several calls. What is not known of one is not known of them all."""
    if any(each.prompt is None or each.output is None for each in calls):
        return NOTHING
    hits = [each.hits for each in calls if each.hits is not None]
    told = {tier: sum(each.get(tier, 0) for each in hits) for tier in TierName}
    return Counted(
        sum(each.prompt or 0 for each in calls),
        told if len(hits) == len(calls) else None,
        sum(each.written for each in calls),
        sum(each.written_1h for each in calls),
        sum(each.output or 0 for each in calls),
    )


def _by_tier(said: Mapping[str, Any], shape: Shape, cached: int) -> Mapping[TierName, int]:
    """The hits by tier. An engine that does not tell tiers had all of them on its device."""
    told = _at(said, shape.tiers) if shape.tiers else None
    if isinstance(told, Mapping):
        hits = {tier: _count(told.get(tier)) or 0 for tier in TierName}
        if sum(hits.values()) == cached:
            return hits
    return {TierName.DEVICE: cached}


def _output(said: Mapping[str, Any], shape: Shape, prompt: int | None) -> int | None:
    """The output with its thoughts, which Gemini and xAI count beside the completion."""
    output = _one(said, (shape.output,))
    if output is None or prompt is None or not shape.thoughts:
        return output
    thoughts, total = _one(said, (shape.thoughts,)) or 0, _one(said, (shape.total,))
    return output + thoughts if total == prompt + output + thoughts else output


def _one(said: Mapping[str, Any], paths: Sequence[str]) -> int | None:
    """The count that these paths lead to; None without any. Raises ValueError if they differ."""
    found = {_count(value) for path in paths if (value := _at(said, path)) is not None}
    if len(found) > 1:
        raise ValueError
    return found.pop() if found else None


def _count(value: object) -> int | None:
    """Raises ValueError for what is no count, booleans among it."""
    if value is None:
        return None
    if type(value) is not int or not 0 <= value <= MAX_COUNT:
        raise ValueError
    return value


def _at(said: Mapping[str, Any], path: str) -> Any:
    found: Any = said
    for name in path.split("."):
        found = found.get(name) if isinstance(found, Mapping) else None
    return found


_PLACES = ("usage", "message.usage", "response.usage", "x_groq.usage")  # Messages', Responses'


def _usage_in(document: Mapping[str, Any]) -> dict[str, Any]:
    """The usage of an event or a body, wherever it stands, with llama-server's `timings`."""
    found = [_at(document, place) for place in _PLACES]
    choices = document.get("choices")
    if isinstance(choices, list):
        found += [each.get("usage") for each in choices if isinstance(each, dict)]  # Moonshot
    said: dict[str, Any] = dict(next((one for one in found if isinstance(one, Mapping)), {}))
    timings = document.get("timings")
    is_last = "usage" in document or any(
        isinstance(each, dict) and each.get("finish_reason") for each in choices or ()
    )
    return said | {"timings": timings} if isinstance(timings, Mapping) and is_last else said
