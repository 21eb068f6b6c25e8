"""What the scheduler hands the runner: one step's work, as block tables and token spans."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine.request import SamplingParams, TokenLogprob
from tiers.blocks.contents import Content


class Embedded(NamedTuple):
    """Rows that stand in place of a span's tokens from `offset` on: a tensor [T, hidden]."""

    offset: int
    rows: Any


@dataclass(slots=True)
class Span:
    """The tokens of one sequence to compute in this step.

    The KV of positions `[0, start)` already stands in the blocks of `block_table`; the runner
    computes positions `[start, start + len(tokens))` and writes their KV to the blocks that the
    table names for them. Position p lives in `block_table[p // block_size]`, row `p % block_size`.

    `sequence_id` is stable over a sequence's life, so that a runner may keep what it derived
    (a contiguous working copy, a penalty histogram) until `Runner.forget(sequence_id)`.
    """

    sequence_id: int
    tokens: NDArray[np.int32]  # [T], T >= 1
    start: int
    block_table: list[int]
    sample: bool  # choose a token after the last position
    params: SamplingParams
    sampled_before: int = 0  # tokens this sequence has generated so far (the seed's position)
    history: NDArray[np.int32] | None = None  # [prompt + generated], where penalties need it
    num_prompt_tokens: int = 0
    adapter: str | None = None  # the name of a LoRA adapter; None is the base model
    contents: tuple[Content, ...] = ()  # what tokens of the sequence stand for, in order
    embedded: tuple[Embedded, ...] = ()  # of the span's own tokens
    allowed: NDArray[np.int32] | None = None  # [ceil(vocabulary / 32)] bits: what may come next
    targets: NDArray[np.int32] | None = None  # [K] prompt tokens after the first K positions,
    # whose log-probabilities are asked for, with the `params.prompt_logprobs` most likely ones
    write_kv: bool = True  # False: the KV of these positions already stands; only logits are asked


class Sampled(NamedTuple):
    """The token chosen for one span (None where `sample` was False, or where none could be)."""

    sequence_id: int
    token: int | None
    logprob: TokenLogprob | None = None
    targets: tuple[TokenLogprob, ...] = ()  # of the span's targets
    error: str | None = None  # why no token could be chosen; a fault of this sequence alone
    suspect: bool = False  # the KV that it was computed from may be no numbers either


@dataclass(slots=True)
class Batch:
    """One step: any mix of prefill chunks and single decode tokens."""

    spans: list[Span] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return sum(len(span.tokens) for span in self.spans)
