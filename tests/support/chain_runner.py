"""A runner without a model, for tests and simulations. Its KV proves which prefix it came from.

The "KV" of position p is a 32-bit hash of the KV of position p - 1, of token p, and of the content
that the token stands for. The adapter takes the place before position 0. So it depends on the whole
prefix, and the sampled token is a function of the last KV. Any wrong, stale, torn or misplaced row
that a step reads shows at once, as `WrongKv` or as tokens that differ from `replay`.
"""

from array import array
from collections.abc import Mapping, Sequence

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray

from engine.batch import Batch, Sampled, Span
from engine.request import TokenLogprob
from engine.structure import GrammarState
from tiers.blocks.contents import Content
from tiers.blocks.layout import BlockLayout, LayerLayout

SEED = 0x5EED


def chain_layout(
    block_size: int = 4, window: int | None = None, *, windowed: int = 1
) -> BlockLayout:
    """The smallest layout for the runner: 16 bytes of KV a token. With a window, it has further
    layers limited to the window, `windowed` of them."""
    sliding = [LayerLayout(1, 2, 2, window=window)] * windowed if window else []
    return BlockLayout((LayerLayout(1, 2, 2), *sliding), block_size, "float32")


class WrongKv(AssertionError):
    """A row of a block table is not the KV of the sequence's prefix."""


class StatelessRunner:
    """The part of a runner that is about recurrent states, of which there are none."""

    def fork(self, sequence_id: int, twin_id: int) -> None:
        raise AssertionError("this model has no recurrent states")

    def holds(self, sequence_id: int, position: int) -> bool:
        return False

    def save(self, sequence_id: int, position: int, slot: int) -> None:
        raise AssertionError("this model has no recurrent states")

    def resume(self, sequence_id: int, position: int, slot: int) -> None:
        raise AssertionError("this model has no recurrent states")

    def probe(self) -> None:
        pass


class ChainRunner(StatelessRunner):
    """Computes hashes in place of a model's KV. `computed` counts the rows written.

    `adapters` maps names to contents.
    """

    def __init__(
        self, pool: torch.Tensor, vocab_size: int = 50, adapters: Mapping[str, bytes] | None = None
    ) -> None:
        self._adapters = adapters or {}
        self._rows = pool.view(torch.int32).numpy()  # [num_blocks, layers, 2, block_size, 1, 2]
        self._block_size = pool.shape[3]
        self._vocab_size = vocab_size
        self.computed = 0
        self.forgotten: list[int] = []

    def step(self, batch: Batch) -> list[Sampled]:
        return [self._span(span) for span in batch.spans]

    def forget(self, sequence_id: int) -> None:
        self.forgotten.append(sequence_id)

    def _span(self, span: Span) -> Sampled:
        adapter = self._adapters[span.adapter] if span.adapter is not None else b""
        value = self._read(span, span.start - 1) if span.start else before(adapter)
        told: list[TokenLogprob] = []
        for offset, token in enumerate(span.tokens):
            position = span.start + offset
            value = advance(value, int(token), content_at(span.contents, position))
            if span.write_kv:
                self._row(span, position)[...] = value
                self.computed += 1
            elif self._read(span, position) != value:
                raise WrongKv(f"position {position} of sequence {span.sequence_id}")
            if span.targets is not None and offset < len(span.targets):
                told.append(TokenLogprob(int(span.targets[offset]), float(value)))
        token = None
        if span.sample:
            token = choose(value, self._vocab_size, span.params.seed, span.allowed)
        return Sampled(span.sequence_id, token, targets=tuple(told))

    def _row(self, span: Span, position: int) -> NDArray[np.int32]:
        slot = span.block_table[position // self._block_size]
        row: NDArray[np.int32] = self._rows[slot, :, :, position % self._block_size]
        return row

    def _read(self, span: Span, position: int) -> int:
        row = self._row(span, position)
        if not (row == row.flat[0]).all():
            raise WrongKv(f"position {position} of sequence {span.sequence_id} is torn")
        return int(row.flat[0])


def before(adapter: bytes = b"") -> int:
    """The value before the first position, from the adapter's content alone."""
    return advance(SEED, 0, adapter) if adapter else SEED


def advance(value: int, token: int, content: bytes = b"") -> int:
    """The KV after `token`, given the KV before it and the content that the token stands for."""
    digest = xxhash.xxh32_intdigest(
        value.to_bytes(4, "little", signed=True) + token.to_bytes(4, "little") + content
    )
    return digest - (1 << 32) if digest >= 1 << 31 else digest


def content_at(contents: Sequence[Content], position: int) -> bytes:
    """The content and the part of it that a position stands for. Empty for text."""
    for content in contents:
        if content.start <= position < content.end:
            part = (position - content.start).to_bytes(4, "little")
            return part + content.length.to_bytes(4, "little") + content.digest
    return b""


def choose(
    value: int, vocab_size: int, seed: int | None = None, allowed: NDArray[np.int32] | None = None
) -> int:
    """The token that follows a KV, among those `allowed`. It varies with the seed."""
    number = (value ^ (seed or 0)) & 0x7FFFFFFF
    if allowed is None:
        return number % vocab_size
    tokens = np.flatnonzero(np.unpackbits(allowed.view(np.uint8), bitorder="little"))
    return int(tokens[number % len(tokens)])


def replay(
    prompt: Sequence[int],
    num_tokens: int,
    vocab_size: int = 50,
    seed: int | None = None,
    grammar: GrammarState | None = None,
    end: int | None = None,
    adapter: bytes = b"",
    contents: Sequence[Content] = (),
) -> list[int]:
    """The tokens that a cold run of the prompt alone generates, one per step."""
    value = before(adapter)
    for position, token in enumerate(prompt):
        value = advance(value, token, content_at(contents, position))
    generated = array("i")
    for _ in range(num_tokens):
        token = choose(value, vocab_size, seed, grammar.allowed if grammar else None)
        generated.append(token)
        if token == end:
            break
        if grammar is not None:
            grammar.accept(token)
        value = advance(value, token)
    return list(generated)
