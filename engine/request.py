"""What enters the engine and what leaves it: immutable values that cross threads.

What is made for each sequence in each step is a named tuple, in a third of a frozen dataclass's
time.
"""

from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import NamedTuple

from engine.structure import Grammar, StructuredOutputs
from tiers.blocks.contents import Content
from tiers.blocks.keys import CacheScope, PrefixKey
from tiers.errors import MissReason
from tiers.telemetry.misses import Absence
from tiers.tier import TierName

_TILE_BYTES = 2  # of a native content's digest: the number of the tile


class FinishReason(StrEnum):
    """Why a sequence ended; `stop` and `length` as OpenAI spells them."""

    STOP = "stop"  # end-of-sequence, a stop token, or a stop string seen by the caller
    LENGTH = "length"  # max_tokens, the context, or the budget
    ABORT = "abort"  # the client went away
    ERROR = "error"  # the engine failed


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are chosen. Ranges are checked by `engine.bounds.check_params`.

    `temperature` 0 is greedy. `top_k` 0 means all. `max_tokens` None means up to the context.
    `logprobs` None returns none, n returns the chosen token's and the n most likely ones';
    `prompt_logprobs` does the same for the prompt's tokens, all of which are computed then.
    `max_tokens` 0 computes the prompt and generates nothing.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    structured_outputs: StructuredOutputs | None = None


@dataclass(frozen=True, slots=True)
class Picture:
    """An image as its file: what a prompt's native contents name tiles of.

    It is cut into `rows` and `columns` of tiles, and the whole of it is a tile more; 0 of both
    where that one is all. `digest` is of the file and of all that turns it into pixels.
    """

    digest: bytes
    data: bytes
    rows: int
    columns: int

    @property
    def num_tiles(self) -> int:
        return self.rows * self.columns + 1

    def tile_digest(self, tile: int) -> bytes:
        """What the native content is named that stands for a tile."""
        return self.digest + tile.to_bytes(_TILE_BYTES, "little")


def tile_of(content: Content) -> tuple[bytes, int]:
    """The digest of the image that a native content is of, and the number of its tile."""
    digest = content.digest
    return digest[:-_TILE_BYTES], int.from_bytes(digest[-_TILE_BYTES:], "little")


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One prompt to serve. `tokens` is an `array('i')` that nobody changes after this."""

    request_id: str
    tokens: "array[int]"
    params: SamplingParams
    scope: CacheScope
    adapter: str | None = None
    grammar: Grammar | None = None  # of `params.structured_outputs`, compiled
    contents: tuple[Content, ...] = ()  # what placeholder tokens stand for, in order
    pictures: tuple[Picture, ...] = ()  # that native contents are tiles of
    cache: bool = True  # False: neither read from the cache nor written to it
    arrival_ns: int = 0  # time.monotonic_ns() when the server received it
    share: str = ""  # whose part of the engine it takes; those who ask are served alike


class TokenCounts(NamedTuple):
    """The disjoint classes a request's tokens fall into. Fixed for the prompt at first admission.

    `hit_device + hit_host + hit_disk + hit_remote + miss == prompt`, always.
    """

    prompt: int
    hit_device: int = 0
    hit_host: int = 0
    hit_disk: int = 0
    hit_remote: int = 0
    output: int = 0

    @property
    def hit(self) -> int:
        return self.hit_device + self.hit_host + self.hit_disk + self.hit_remote

    @property
    def miss(self) -> int:
        return self.prompt - self.hit

    def with_output(self, output: int) -> "TokenCounts":
        """The same prompt after so many tokens were generated."""
        return TokenCounts(
            self.prompt, self.hit_device, self.hit_host, self.hit_disk, self.hit_remote, output
        )


class Timeline(NamedTuple):
    """Where a request's time went, in nanoseconds of the monotonic clock; 0 means not reached."""

    arrival_ns: int = 0
    admitted_ns: int = 0  # its turn came: its prefix began to be brought up
    loaded_ns: int = 0  # the prefix stands on the device, prefill starts
    first_token_ns: int = 0
    last_token_ns: int = 0


@dataclass(frozen=True, slots=True)
class BlockRun:
    """Neighbouring tokens of a prompt that one tier served, or that were computed (`source` None).

    `last_key` names the last full block that was served whole; what was computed has none.
    """

    source: TierName | None
    start: int
    num_tokens: int
    num_blocks: int  # blocks touched, a partly used one included
    last_key: PrefixKey | None = None


@dataclass(frozen=True, slots=True)
class Lookup:
    """What the cache said of a prompt at first admission, from the first token to the last.

    `stop` says why the hit ended where it did, `absence` what is known of the first block missed.
    """

    runs: tuple[BlockRun, ...]
    stop: MissReason
    block_size: int
    absence: Absence | None = None


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A chosen token's log-probability and the most likely alternatives', most likely first."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    rank: int = 0  # 1 for the most likely token; 0 where it was not asked for


class StepOutput(NamedTuple):
    """What one step made for one sequence of one request.

    `index` numbers the sequences of a request (`params.n`). `counts.output` is the sum over the
    request so far. `miss_reasons` says, per reason, how many prompt tokens were computed for it;
    it is set on a request's first output, and sums to `counts.miss`. Of a request that was ended
    within its prompt, `counts.prompt` is what was served or computed until then.
    """

    request_id: str
    index: int  # type: ignore[assignment]  # nobody looks for a value in it, as in a tuple
    tokens: tuple[int, ...]
    counts: TokenCounts
    finish: FinishReason | None = None
    logprobs: tuple[TokenLogprob, ...] = ()
    miss_reasons: Mapping[MissReason, int] = MappingProxyType({})
    lookup: Lookup | None = None  # on a request's first output
    timeline: Timeline = Timeline()
    error: str | None = None
    last: bool = False  # no further output of this request will come, in any of its sequences
    prompt_logprobs: tuple[TokenLogprob, ...] = ()  # of all prompt tokens but the first, once
    num_jumped: int = 0  # of `tokens`, those that a grammar forced and no step was spent on
