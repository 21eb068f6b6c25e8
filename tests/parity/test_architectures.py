"""Every architecture of docs/models.md answers exactly as transformers does, however it is served.

Cold, from each tier, after a restart, batched and in chunks. The page's rows are what these tests
found.
"""

import logging
from dataclasses import replace

import numpy as np
import pytest
import torch

from engine.batch import Batch, Span
from engine.execution.runner import ModelRunner
from engine.models.arithmetic import arithmetic_of
from engine.models.elementwise import Watch
from engine.models.probe import PROBE_TOKENS, probe_logits
from engine.promise import Equal
from engine.request import SamplingParams
from tests.parity import architectures
from tests.parity.architectures import ARCHITECTURES, VOCAB_SIZE
from tests.support.house import BLOCK, House, from_every_tier
from tests.support.models import greedy_tokens, new_pool

NUM_OUT = 8  # as many as a House generates


@pytest.fixture(params=[each for each in ARCHITECTURES if each not in architectures.RECURRENT])
def loaded(request):
    logging.getLogger("transformers").setLevel(logging.ERROR)  # of configs that are unusually small
    return architectures.served(request.param)


def prompt(length, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCAB_SIZE, (length,), generator=generator).tolist()


def stock_tokens(model_type, tokens):
    """transformers' own greedy tokens, with eager attention, computed whole for every token."""
    model = architectures.stock(model_type)
    model.set_attn_implementation("eager")
    return greedy_tokens(model, tokens, NUM_OUT)


def test_tokens_are_those_of_transformers_cold_and_from_every_tier(loaded, tmp_path):
    """75 tokens: beyond every window, and beyond the border of LongRoPE's tables."""
    tokens = prompt(4 * BLOCK + 11, seed=1)
    expected = stock_tokens(loaded.name.removeprefix("tiny-"), tokens)

    def side_by_side(house):
        """In chunks: a short one, one that shares a prefix, one of its own."""
        others = [tokens[:40], tokens[:50] + prompt(30, seed=2), prompt(90, seed=3)]
        together = house.ask([tokens, *others])
        alone = [house.ask([each], cache=False)[0][0] for each in others]
        assert [expected, *alone] == [answer for answer, _ in together]

    answers, hits = from_every_tier(
        lambda: House(loaded, tmp_path),
        lambda house, **asked: house.ask([tokens], **asked),
        side_by_side,
    )
    assert [expected] * 6 == answers
    assert [0, 0] == hits[:2] and 4 * BLOCK <= min(hits[2:]), hits
    assert architectures.row(loaded) in architectures.PAGE.read_text(encoding="utf-8").splitlines()


@pytest.mark.parametrize("num_threads", [1, 2])
def test_where_bits_are_promised_chunks_and_rows_beside_move_none(loaded, num_threads, threads):
    threads(num_threads)
    with Watch(PROBE_TOKENS) as watch:
        probe_logits(loaded.model, loaded.port)
    arithmetic = arithmetic_of(loaded.model, "cpu", watch.calls)
    promise = replace(loaded, arithmetic=arithmetic).promise(activated_by_row=False)
    if promise.equal is not Equal.BITS:
        pytest.skip(promise.reason)
    tokens = np.array(prompt(100, seed=1), np.int32)
    whole = kept(loaded, tokens, [100])
    assert [True] * 2 == [
        torch.equal(whole, kept(loaded, tokens, cuts, beside))
        for cuts, beside in (([41, 1, 3, 20, 2, 32, 1], 0), ([64, 36], 13))
    ]


def kept(loaded, tokens, cuts, beside=0):
    """The KV of the prompt, computed in chunks of these sizes, each beside as many tokens of
    another."""
    pool = new_pool(loaded, 16, BLOCK).zero_()
    runner, greedy, start = ModelRunner(loaded, pool), SamplingParams(temperature=0), 0
    for number, count in enumerate(cuts):
        chunk = tokens[start : start + count]
        spans = [Span(0, chunk, start, list(range(8)), False, greedy)]
        if beside:
            spans.append(Span(number + 1, tokens[:beside], 0, [8 + number], False, greedy))
        runner.step(Batch(spans))
        start += count
    return pool[:8]


def test_the_page_has_a_row_for_each():
    text = architectures.PAGE.read_text(encoding="utf-8")
    rows = architectures.between(text, "architectures").splitlines()[2:]
    assert [f"| `{each}`" for each in ARCHITECTURES] == [row[: row.index(" |", 2)] for row in rows]


@pytest.mark.parametrize("model_type", ["llama", "deepseek_v3", "gpt_oss", "gemma4_text", "lfm2"])
def test_rounded_kv_answers_the_same_cold_and_from_every_tier(model_type, tmp_path):
    """Kept in bfloat16 under a model in float32: cold and hit read the same rounded numbers."""
    tokens = prompt(4 * BLOCK + 11, seed=1)
    answers, hits = from_every_tier(
        lambda: House(architectures.served(model_type), tmp_path, kv_dtype="bfloat16"),
        lambda house, **asked: house.ask([tokens], **asked),
    )
    assert [answers[0]] * 6 == answers
    assert [4 * BLOCK] * 2 == hits[4:]
