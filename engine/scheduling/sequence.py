"""One sequence being generated: its tokens, its blocks, and how much of its KV is computed.

Owned by the scheduler, on the engine thread.
"""

from array import array
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from engine.request import FinishReason, Lookup, Request, SamplingParams, TokenCounts, TokenLogprob
from engine.structure import GrammarState
from tiers.blocks.chain import Chain
from tiers.errors import MissReason
from tiers.memory.block import Block
from tiers.transfer.ticket import Ticket


class SequenceState(StrEnum):
    """The states of a sequence."""

    WAITING = "waiting"
    LOADING = "loading"  # waiting, while its prefix is being promoted
    PREFILL = "prefill"
    DECODE = "decode"
    FINISHED = "finished"


# On Python 3.11, looking up an enum member takes 60 ns and a module's name 2 ns.
WAITING, LOADING, PREFILL, DECODE, FINISHED = SequenceState
_INT32 = np.dtype(np.int32)


@dataclass(slots=True, eq=False)
class Sequence:
    """One of the `n` sequences of a request.

    Invariants: the KV of positions `[0, num_standing)` is computed. `blocks` cover these positions
    and perhaps more. `block_table[i]` is the slot of `blocks[i]`, for the leading blocks that have
    one. The chain's tokens are the prompt and all generated tokens.
    """

    sequence_id: int
    index: int
    request: Request
    params: SamplingParams
    chain: Chain
    tokens: "array[int]"
    num_prompt: int
    grammar: GrammarState | None = None  # its position in its grammar; kept when preempted
    state: SequenceState = WAITING
    blocks: list[Block] = field(default_factory=list)
    block_table: list[int] = field(default_factory=list)
    num_standing: int = 0
    state_at: int = 0  # where its last step began, from whose states others can continue
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_done: int = 0  # the most prompt tokens ever served or computed
    ticket: Ticket | None = None
    follows: bool = False  # its ticket waits for a block that another sequence computes
    counts: TokenCounts | None = None  # of the prompt, fixed at first admission
    miss_reasons: dict[MissReason, int] = field(default_factory=dict)
    lookup: Lookup | None = None
    finish: FinishReason | None = None
    queued_ns: int = 0
    passed_ns: int = 0  # when a later one was first admitted before it; 0: never
    admitted_ns: int = 0
    loaded_ns: int = 0
    first_token_ns: int = 0
    num_preemptions: int = 0
    work: float = 0.0  # tokens to compute before it can answer, estimated on arrival

    @property
    def share(self) -> str:
        return self.request.share

    @property
    def ready(self) -> bool:
        """Whether its grammar's allowed tokens are known. Until then it sits steps out."""
        return self.grammar is None or self.grammar.ready

    @property
    def reads_cache(self) -> bool:
        """Whether it may use cached blocks. It may not while their logits are needed."""
        return self.params.prompt_logprobs is None or (
            len(self.prompt_logprobs) == self.num_prompt - 1
        )

    def targets(self, start: int, end: int) -> NDArray[np.int32] | None:
        """The prompt tokens after positions `[start, end)` whose log-probabilities are
        requested."""
        if self.params.prompt_logprobs is None:
            return None
        last = min(end, self.num_prompt - 1)
        if self.reads_cache or last <= start:
            return None
        return self.span_tokens(start + 1, last + 1)

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def cut_short(self) -> bool:
        """Whether it ended before its prompt was served or computed."""
        return self.finish is not None and self.prompt_done < self.num_prompt

    @property
    def start(self) -> int:
        """The first position to compute next. At least the last token is computed, for its
        logits."""
        return min(self.num_standing, len(self.tokens) - 1)

    def history(self) -> NDArray[np.int32] | None:
        """All tokens so far, if a penalty needs them."""
        p = self.params
        if p.presence_penalty or p.frequency_penalty or p.repetition_penalty != 1.0:
            return np.array(self.tokens, dtype=np.int32)
        return None

    def span_tokens(self, start: int, end: int) -> NDArray[np.int32]:
        return np.frombuffer(self.tokens[start:end], _INT32)

    def append(self, token: int) -> None:
        self.tokens.append(token)
        self.chain.append(token)
