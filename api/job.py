"""The values of one request: what to generate, its text, its result and its bill.

Frozen values, made on the event loop; they depend on no route and no collaborator.
"""

from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from api.served_model import ServedModel
from billing.errors import GateError
from billing.gate.holds import RequestContext
from billing.gate.outcomes import Outcome
from billing.prices.book import RateRef
from billing.prices.rating import Line
from billing.usage import EMPTY, Usage
from engine.errors import RemoteFault
from engine.request import FinishReason, Lookup, SamplingParams, Timeline, TokenLogprob
from engine.scheduling.shares import part_of
from engine.structure import Grammar, GrammarSource
from tiers.blocks.chain import Chain
from tiers.blocks.contents import Content, block_contents
from tiers.blocks.keys import CacheScope, PrefixKey
from tiers.errors import MissReason
from tiers.policy.retention import Pin


class DivergenceReason(StrEnum):
    """Why a turn's tokens diverge from the earlier turn's although the messages are equal."""

    TEMPLATE = "template"  # it renders the old messages differently
    TOKENIZER = "tokenizer"  # the same text, in other tokens than were generated


@dataclass(frozen=True, slots=True)
class Divergence:
    """Of the `of_tokens` that the earlier turn left for repeated messages, `at_token` match."""

    at_token: int
    of_tokens: int
    reason: DivergenceReason


@dataclass(frozen=True, slots=True)
class Turn:
    """One request's messages: `keys[i]` names the conversation up to and including message i."""

    keys: tuple[bytes, ...]
    roles: tuple[str, ...]
    salt: bytes = b""  # the tenant's
    goes_on: bool = False  # the answer continues the last message

    @property
    def answered_key(self) -> bytes:
        """The conversation that the answer's message follows."""
        return self.keys[-2:][0] if self.goes_on else self.keys[-1]


@dataclass(frozen=True, slots=True)
class Transcript:
    """One choice of an answer: the text the client read, and the tokens generated for it."""

    text: str
    tokens: tuple[int, ...]


HOUR_S = 3600


@dataclass(frozen=True, slots=True)
class Keep:
    """A request to pin the prompt's first `num_tokens` for this long."""

    num_tokens: int
    for_s: float


@dataclass(frozen=True, slots=True)
class Session:
    """The conversation of a request, by the client's name for it.

    `pause_s` is how long it may pause after this request: 0 if it ends, None if the pause is to be
    learned. While the session runs, its `parent` waits.
    """

    name: str
    parent: str = ""
    pause_s: float | None = None


@dataclass(frozen=True, slots=True)
class Kept:
    """A tenant's pin as the tenant sees it. `name` is the tenant's own name for it."""

    pin: Pin[PrefixKey]
    name: str
    expires_s: float  # Unix time


@dataclass(frozen=True, slots=True)
class Priced:
    """A usage at the current price, in units; `output` is the price of the longest answer."""

    currency: str
    prompt: int
    output: int
    ref: RateRef


@dataclass(frozen=True, slots=True)
class Bill:
    """The settled cost of a request. Amounts are decimal strings in `currency`."""

    usage: Usage = EMPTY
    currency: str | None = None
    cost: str | None = None
    saved: str | None = None  # compared with the same tokens uncached
    price_version: str | None = None
    service_tier: str = ""  # whose factor is in the price; empty: none
    rate: RateRef | None = None  # the price it was rated at
    lines: tuple[Line, ...] = ()
    note: str | None = None  # why hits cost as much as misses
    receipt: Callable[[], Mapping[str, Any]] | None = None  # signs when called


@dataclass(frozen=True, slots=True)
class Asked:
    """Which parts of the vendor block a client asked for."""

    details: bool = False
    receipt: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What to generate. `prompts` are token ids. No prompt and no `stop` string is empty."""

    request_id: str
    model: ServedModel
    prompts: "tuple[array[int], ...]"
    params: SamplingParams
    scope: CacheScope  # with the tenant's salt
    tenant: str = ""  # whose share of the engine it uses
    user: str = ""  # whose part of it, if the tenant divides it by end users
    stop: tuple[str, ...] = ()
    markers: tuple[str, ...] = ()  # special tokens that are part of the answer's text
    source: GrammarSource | None = None  # the required form of the answer
    grammar: Grammar | None = None  # `source`, compiled
    turn: Turn | None = None  # the chat's messages, if their tokens are to be remembered
    divergence: Divergence | None = None  # from the tokens of the chat's earlier turn
    message_of: Callable[[str], Mapping[str, Any]] | None = None  # an answer as chats resend it
    replayed_tokens: int = 0  # of the prompt, reused from the earlier turn
    # Tokens at most of a prompt that only an engine elsewhere counts. Then there are no `prompts`.
    prompt_most: int = 0
    held_whole: bool = False  # all of its output is held at once, as nobody counts it meanwhile
    cache: bool = True
    keeps: tuple[Keep, ...] = ()  # of its one prompt
    session: Session | None = None
    stream: bool = False  # send text as it comes, else the whole answer at once
    arrival_ns: int = 0
    context: RequestContext = field(default_factory=RequestContext)  # for the ledger
    contents: tuple[Content, ...] = ()  # of every prompt: what keeps its blocks apart

    def only_prompt(self) -> "Job":
        """The same prompt without an answer and without a turn to remember."""
        params = replace(self.params, max_tokens=0, min_tokens=0)
        return replace(self, params=params, source=None, turn=None)

    def chain(self, number: int, block_size: int) -> Chain:
        """The blocks of a prompt."""
        contents = block_contents(self.contents, block_size)
        return Chain(self.scope.root(), self.prompts[number], block_size, contents)

    @property
    def share(self) -> str:
        return part_of(self.tenant, self.user) if self.user else self.tenant

    @property
    def max_output(self) -> int:
        """The maximum of output tokens over all choices together."""
        limit = self.params.max_tokens
        return (self.model.max_context if limit is None else limit) * self.num_choices

    @property
    def tokens_for_1h(self) -> int:
        """Leading tokens to pin for an hour or longer."""
        return max((keep.num_tokens for keep in self.keeps if keep.for_s >= HOUR_S), default=0)

    @property
    def tokens_marked(self) -> int:
        """Leading tokens that the request asked to pin."""
        return max((keep.num_tokens for keep in self.keeps), default=0)

    @property
    def prompt_tokens(self) -> int:
        return sum(map(len, self.prompts)) + self.prompt_most

    @property
    def longest_prompt(self) -> int:
        return max(map(len, self.prompts), default=self.prompt_most)

    @property
    def num_choices(self) -> int:
        return max(1, len(self.prompts)) * self.params.n

    @property
    def engine_ids(self) -> tuple[str, ...]:
        if len(self.prompts) == 1:
            return (self.request_id,)
        return tuple(f"{self.request_id}.{number}" for number in range(len(self.prompts)))


@dataclass(frozen=True, slots=True)
class Delta:
    """New text of one choice. `tokens` are the tokens not reported before."""

    choice: int  # index in the answer: prompt number * n + sequence index
    text: str
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    finish: FinishReason | None = None
    stop: str | None = None  # the stop string that ended it
    refusal: GateError | None = None  # why the rest is not paid for
    raw: bytes = b""  # as an engine elsewhere wrote it, in its client's protocol


@dataclass(frozen=True, slots=True)
class Served:
    """The result of a request and its billed `usage`."""

    outcome: Outcome
    usage: Usage
    miss_reasons: Mapping[MissReason, int]
    timeline: Timeline  # of the first prompt
    error: str | None = None
    fault: RemoteFault | None = None  # of an engine elsewhere; `error` has its words
    refusal: GateError | None = None  # of money for the rest of the answer, with Outcome.BUDGET
    lookups: tuple[Lookup, ...] = ()  # of the prompts that were admitted
    finishes: tuple[FinishReason | None, ...] = ()  # of the choices
    prompt_logprobs: tuple[tuple[TokenLogprob, ...], ...] = ()  # by prompt, if requested
    transcripts: tuple[Transcript, ...] = ()  # of the choices, if the job is a chat's turn
    divergence: Divergence | None = None
    replayed_tokens: int = 0
    jumped_tokens: int = 0  # decode steps that a grammar's forced tokens saved


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivered:
    """How a delivery ended: what was sent, and whether the client was there to the last byte."""

    status: int
    served: Served
    bill: Bill | None
    complete: bool
    error: Exception | None
    first_byte_ns: int
