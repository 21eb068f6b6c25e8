"""The values that enter and leave the engine: immutable, so that they can cross threads.

Values made for each sequence in each step are named tuples, which take a third of the time of a
frozen dataclass.
"""

from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import NamedTuple

from engine.errors import RemoteFault
from engine.structure import Grammar
from tiers.blocks.contents import Content
from tiers.blocks.keys import CacheScope, PrefixKey
from tiers.errors import MissReason
from tiers.telemetry.misses import Absence
from tiers.tier import TierName


class FinishReason(StrEnum):
    """Why a sequence ended. `stop` and `length` are OpenAI's spellings."""

    STOP = "stop"  # end-of-sequence, a stop token, or a stop string seen by the caller
    LENGTH = "length"  # max_tokens, the context, or the budget
    ABORT = "abort"  # the client left
    ERROR = "error"  # the engine failed
    UNMATCHED = "unmatched"  # its grammar allows no token, or takes too long to say which


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are chosen. `engine.bounds.check_params` checks the ranges.

    `temperature` 0 is greedy. `top_k` 0 means all. `max_tokens` None means up to the context, and 0
    computes the prompt and generates nothing. `logprobs` None returns none; n returns those of the
    chosen token and of the n most likely. `prompt_logprobs` does the same for the prompt's tokens,
    all of which are then computed.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One prompt to serve. `tokens` is an `array('i')` that must not change any more."""

    request_id: str
    tokens: "array[int]"
    params: SamplingParams
    scope: CacheScope
    adapter: str | None = None
    grammar: Grammar | None = None  # the required form of the answer, compiled
    contents: tuple[Content, ...] = ()  # what placeholder tokens stand for, in order
    cache: bool = True  # False: neither read nor write the cache
    arrival_ns: int = 0  # time.monotonic_ns() when the server received it
    share: str = ""  # whose share of the engine it uses; shares are served equally
    keeps: tuple[int, ...] = ()  # tokens of the prefixes that will be pinned: resumable there


class TokenCounts(NamedTuple):
    """The disjoint classes a request's tokens fall into. Fixed for the prompt at first admission.

    `hit_device + hit_host + hit_disk + hit_remote + miss == prompt`, always. The hits are in the
    order of `TierName`.
    """

    prompt: int
    hit_device: int = 0
    hit_host: int = 0
    hit_disk: int = 0
    hit_remote: int = 0
    output: int = 0

    @property
    def hit(self) -> int:
        return sum(self[1:-1])

    @property
    def miss(self) -> int:
        return self.prompt - self.hit

    def with_output(self, output: int) -> "TokenCounts":
        """The same counts after `output` generated tokens."""
        return TokenCounts(*self[:-1], output)

    @staticmethod
    def of(prompt: int, hits: Mapping[TierName, int]) -> "TokenCounts":
        """The counts at admission, from the hits by tier."""
        return TokenCounts(prompt, *(hits.get(tier, 0) for tier in TierName))


class Timeline(NamedTuple):
    """Where a request's time went, in nanoseconds of the monotonic clock; 0 means not reached."""

    arrival_ns: int = 0
    admitted_ns: int = 0  # admitted: its prefix began to be promoted
    loaded_ns: int = 0  # its prefix is on the device; prefill starts
    first_token_ns: int = 0
    last_token_ns: int = 0


@dataclass(frozen=True, slots=True)
class BlockRun:
    """Consecutive tokens of a prompt that one tier served, or that were computed (`source` None).

    `last_key` names the last full block that was served whole. It is None for computed tokens.
    """

    source: TierName | None
    start: int
    num_tokens: int
    num_blocks: int  # blocks touched, including a partly used one
    last_key: PrefixKey | None = None


@dataclass(frozen=True, slots=True)
class Lookup:
    """The result of a prompt's lookup at first admission, from the first token to the last.

    `stop` says why the hit ended where it did. `absence` tells what is known of the first missed
    block.
    """

    runs: tuple[BlockRun, ...]
    stop: MissReason
    block_size: int
    absence: Absence | None = None


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """The log-probabilities of a chosen token and of the most likely alternatives, in that
    order."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    rank: int = 0  # 1 for the most likely token; 0 if not requested


class StepOutput(NamedTuple):
    """The output of one step for one sequence of one request.

    `index` numbers the sequences of a request (`params.n`). `counts.output` is the sum over the
    request so far. `miss_reasons` counts the computed prompt tokens by reason. It is set on a
    request's first output and sums to `counts.miss`. If a request ends within its prompt,
    `counts.prompt` counts the tokens served or computed until then.
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
    fault: RemoteFault | None = None  # of an engine elsewhere; `error` has its words
    last: bool = False  # this is the request's last output, over all its sequences
    prompt_logprobs: tuple[TokenLogprob, ...] = ()  # for all prompt tokens but the first, once
    num_jumped: int = 0  # of `tokens`, those forced by a grammar without a step
