"""DeepSeek-V4: attention over a window and over compressed entries.

That it answers as transformers does from every tier is in `test_architectures`, and that its steps,
samples and adapters leave open entries alone is in `test_states`.
"""

import logging
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.attention.base import AttentionCall, AttentionOptions
from engine.attention.compressed import CompressedAttention, Compressor, EntryIndex, EntryRows
from engine.attention.kv_pool import KvPool
from engine.batch import Span
from engine.errors import AdapterError, ModelError
from engine.models.load import LoadedModel, load_adapter
from engine.request import SamplingParams
from tests.parity import architectures
from tests.parity.test_architectures import prompt, stock_tokens
from tests.parity.test_engine_tiers import BLOCK, House
from tests.parity.test_recurrent import generated_tokens
from tests.support.models import save_adapter
from tiers.blocks.layout import BlockLayout, LayerLayout

KIND = "deepseek_v4"
TOKENS = 37


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    logging.getLogger("transformers").setLevel(logging.ERROR)
    return architectures.served(KIND)


@pytest.fixture
def house(loaded: LoadedModel, tmp_path: Path) -> Iterator[House]:
    house = House(loaded, tmp_path, step_tokens=BLOCK)
    yield house
    house.close()


def test_a_block_has_an_entry_for_every_rate_tokens(loaded):
    """Of three layers with entries, two have an index as well."""
    layout = loaded.layout(BLOCK)
    sparse, heavy, index = BLOCK // 4 * 16, BLOCK // 8 * 16, BLOCK // 4 * 16
    assert 4 * (2 * (sparse + index) + heavy) == layout.lasting_nbytes
    windows, rows = 4 * BLOCK * 16, 2 * (8 * 64 + 8 * 64) + 8 * 32
    assert 4 * (windows + rows) == layout.nbytes - layout.lasting_nbytes
    assert (2, True) == (layout.reach, layout.has_states)


def test_blocks_that_would_cut_an_entry_are_refused_in_a_sentence(loaded):
    assert 0 == loaded.layout().block_size % 8
    with pytest.raises(
        ModelError, match="blocks of 20 would cut; set the block size to a multiple of 8"
    ):
        loaded.layout(20)


def test_prompts_of_every_length_answer_as_transformers_does(house):
    """Around entries, the window, the number of entries that are picked, and blocks."""
    tokens = prompt(6 * BLOCK, seed=5)
    for length in (1, 3, 4, 5, 8, 15, 16, 23, 24, 27, 28, 29, 2 * BLOCK, 5 * BLOCK + 3):
        expected = stock_tokens(KIND, tokens[:length])
        assert expected == generated_tokens(KIND, tokens[:length])
        for cache in (False, True, True):
            [(answer, _)] = house.ask([tokens[:length]], cache=cache)
            assert expected == answer


def test_an_adapter_of_the_grouped_output_is_refused(loaded, tmp_path):
    """Its layer multiplies each group of heads by weights of its own."""
    save_adapter(tmp_path, architectures.stock(KIND), r=4, target_modules=["o_a_proj"])
    with pytest.raises(AdapterError, match="is not computed for every token"):
        load_adapter(loaded, "grouped", str(tmp_path))


# Attention.


HEADS, SIZE, WINDOW, TOP_K = 4, 16, 6, 3
INDEX_HEADS, INDEX_SIZE, HIDDEN = 8, 16, 64


def compressors() -> tuple[Any, Compressor, Compressor]:
    """A layer's compressor and its index's, of transformers' tiny model."""
    module = architectures.stock(KIND).model.layers[1].self_attn.compressor
    return module, Compressor(module, 1), Compressor(module.indexer, 3)


def layers_of(main: Compressor, index: Compressor) -> tuple[LayerLayout, ...]:
    kept = {**main.layouts(), **index.layouts(TOP_K)}
    return (LayerLayout(1, SIZE, SIZE, shared=True, window=WINDOW), *kept.values())


def span(sequence: int, start: int, count: int, *, write_kv: bool = True) -> Span:
    tokens = np.zeros(count, np.int32)
    table = [[2, 0, 1, 5, 4], [8, 6, 7, 9, 3]][sequence]
    params = SamplingParams(temperature=0)
    return Span(sequence, tokens, start, table, False, params, write_kv=write_kv)


class Rows:
    """What two sequences of equal tokens compute, and attention over it."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(3)
        _, self.main, self.index = compressors()
        self.layers = layers_of(self.main, self.index)
        hidden = torch.randn(TOKENS, HIDDEN, generator=generator)
        self.rows, self.index_rows = (
            each.rows_of(hidden[None]) for each in (self.main, self.index)
        )
        self.query = torch.randn(TOKENS, HEADS, SIZE, generator=generator)
        self.key = torch.randn(TOKENS, 1, SIZE, generator=generator)
        self.index_query = torch.randn(TOKENS, INDEX_HEADS, INDEX_SIZE, generator=generator)
        self.weights = torch.randn(TOKENS, INDEX_HEADS, generator=generator)
        self.options = AttentionOptions(0.25, WINDOW, sinks=torch.linspace(-1, 2, HEADS))

    def attend(self, attention: CompressedAttention, spans: list[Span]) -> torch.Tensor:
        at = torch.cat([torch.arange(s.start, s.start + len(s.tokens)) for s in spans])
        index = EntryIndex(
            self.index, self.index_rows[at], self.index_query[at], self.weights[at], TOP_K
        )
        attention.begin(spans)
        call = AttentionCall(0, self.query[at], self.key[at], self.key[at], self.options)
        return attention.attend_with(call, EntryRows(self.main, self.rows[at], index))

    def expected(self) -> torch.Tensor:
        """With masks, over the entries of the whole sequence at once."""
        entries, keys = (
            each.made(torch.cat([each.nothing(4, rows), rows]), 0)
            for each, rows in ((self.main, self.rows), (self.index, self.index_rows))
        )
        scores = torch.einsum("thd,ed->the", self.index_query, keys).relu()
        scores = (scores * self.weights[:, :, None]).sum(1)
        place = torch.arange(TOKENS)[:, None]
        ended = torch.arange(len(entries)) < (place + 1) // 4
        best = scores.masked_fill(~ended, -torch.inf).topk(TOP_K).indices
        seen = torch.zeros_like(ended).scatter(1, best, True) & ended
        near = (torch.arange(TOKENS) <= place) & (torch.arange(TOKENS) > place - WINDOW)
        all_keys = torch.cat([self.key[:, 0], entries])
        mask = torch.cat([near, seen], 1)
        scores = torch.einsum("thd,kd->thk", self.query, all_keys) * 0.25
        scores = scores.masked_fill(~mask[:, None], -torch.inf)
        sinks = self.options.sinks[None, :, None].expand(TOKENS, -1, 1)
        shares = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
        return torch.einsum("thk,kd->thd", shares, all_keys)


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@torch.inference_mode()
def test_any_cut_into_steps_makes_the_same_entries_and_attends_to_them(threads):
    """Alone, in chunks on both sides of entries and blocks, beside another, after a step that
    failed, and a last token again."""
    rows = Rows()
    expected = rows.expected()
    whole = None
    for cuts in (
        [TOKENS],
        [4, TOKENS],
        [3, 5, 6, 8, 21, TOKENS],
        [15, 16, 17, 32, TOKENS],
        [*range(1, TOKENS + 1)],
    ):
        pool = torch.full((10, *BlockLayout(rows.layers, 8, "float32").shape), torch.nan)
        attention = CompressedAttention(pool, rows.layers)
        outputs = []
        for start, end in pairwise([0, *cuts]):
            spans = [span(0, start, end - start), span(1, start, end - start)]
            rows.attend(attention, spans)  # fails before its end
            output = rows.attend(attention, spans)
            attention.finish()
            assert torch.equal(output[: end - start], output[end - start :])
            outputs.append(output[: end - start])
        together = torch.cat(outputs)
        torch.testing.assert_close(together, expected)
        whole = together if whole is None else whole
        assert torch.equal(whole, together), cuts
        for layer in (rows.main.rows, rows.index.rows):  # which a wholly cached prompt needs not
            KvPool(pool, rows.layers).layers[layer].key.fill_(torch.nan)
        for last in (15, 31):  # the last token of full blocks
            again = rows.attend(attention, [span(0, last, 1, write_kv=False)])
            attention.finish()
            assert torch.equal(whole[last : last + 1], again)
