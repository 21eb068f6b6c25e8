"""The Triton decode kernel against the reference, in Triton's interpreter on the CPU.

Triton decides at its own import whether kernels are interpreted, so the tests below run in a child
process that sets the variable first; here they are skipped and the child's verdict is asserted.
"""

import numpy as np
import pytest
import torch

from engine.attention import pieces as attention_pieces
from engine.attention.base import TAIL_QUERIES, AttentionOptions, ReferenceAttention, attend_dense
from engine.attention.pieces import PagedKeys
from engine.batch import Batch, Span
from engine.execution.cuda_graphs import StepGraphs, cuda_graphs
from engine.execution.runner import ModelRunner
from tests.parity.attending import PARAMS, attended, span
from tests.support.interpreted import INTERPRETED, TIMEOUT_S, in_child, in_parent, run_in_child
from tests.support.models import new_pool, tiny_model
from tiers.blocks.layout import LayerLayout

triton = pytest.importorskip("triton", reason="triton is not installed")

LAYERS, KV_HEADS, BLOCK = 2, 2, 16
CPU = torch.device("cpu")

if INTERPRETED:
    from triton.runtime.errors import OutOfResources

    from engine.attention import triton as paged


@pytest.fixture(autouse=True)
def few_programs(monkeypatch):
    """The interpreter runs programs one after another, also those that find nothing to do."""
    monkeypatch.setattr(attention_pieces, "PROGRAMS", 2)


@pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")
def test_nothing_that_varies_in_service_recompiles_the_kernel():
    from engine.attention.kernels import _paged_kernel

    strides = {f"query_{of}_stride" for of in ("sequence", "row", "head")}
    plain = {p.name for p in _paged_kernel.params if p.do_not_specialize}
    assert {"window", "table_stride"} | strides == plain


@in_parent
@pytest.mark.timeout(TIMEOUT_S)
def test_the_kernel_under_the_interpreter():
    assert "27 passed" in run_in_child(__file__, loops=True)


def agree(heads, dim, options, spans, *, rank=None, dtype=torch.float32):
    """The kernel's path gives what the reference does, and both write the same. Of latents if they
    have a `rank`; `heads` in all."""
    plain = LayerLayout(KV_HEADS, dim, dim)
    layers = (plain if rank is None else LayerLayout(1, dim, rank, shared=True),) * LAYERS
    generator = torch.Generator().manual_seed(1)
    shape = (2, BLOCK, KV_HEADS) if rank is None else (1, BLOCK, 1)
    pool = torch.randn(45, LAYERS, *shape, dim, generator=generator).to(dtype)
    pools = pool.clone(), pool.clone()
    paths = ReferenceAttention(pools[0], layers), paged.TritonAttention(pools[1], layers)
    expected, actual = (attended(path, layers, spans, options, heads, 5) for path in paths)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
    assert torch.equal(pools[0], pools[1]), "both paths write the same"


def options_of(scaling, window, scores, heads):
    return AttentionOptions(
        scaling,
        window=window,
        softcap=4.0 if scores == "cap" else None,
        sinks=torch.linspace(-2, 9, heads) if scores == "sinks" else None,
    )


@in_child
@pytest.mark.parametrize(
    ("groups", "dim", "window", "scores", "dtype"),
    [
        (4, 16, 21, "sinks", torch.float32),
        (3, 32, None, None, torch.float32),
        (1, 16, None, None, torch.float32),
        (4, 24, None, None, torch.float32),  # neither a power of two nor a multiple of 16
        (3, 32, 21, None, torch.float32),
        (3, 32, None, "cap", torch.float32),
        (3, 32, 70, "cap", torch.bfloat16),
    ],
)
def test_decode_and_prefill_agree_with_the_reference(groups, dim, window, scores, dtype):
    spans = [
        span(1, 0, 1, [3]),
        span(2, 140, 1, [9, 2, 17, 4, 5, 6, 7, 8, 1]),
        span(3, 20, 5, [20, 21]),
        span(4, 15, 1, [22]),
        span(5, 16, 1, [24, 23], write_kv=False),
        span(6, 130, 19, [0, 10, 11, 12, 13, 14, 15, 16, 18, 19]),
        span(7, 0, 65, [25, 26, 27, 28, 29]),  # too long for the kernel
    ]
    heads = KV_HEADS * groups
    agree(heads, dim, options_of(dim**-0.5, window, scores, heads), spans, dtype=dtype)


@in_child
@pytest.mark.parametrize(
    ("shape", "window", "scores", "dtype"),
    [
        ((20, 16, 8), None, None, torch.float32),  # two tiles of heads, the second not full
        ((4, 40, 24), None, None, torch.float32),  # no powers of two
        ((16, 16, 8), 21, "sinks", torch.float32),
        ((8, 32, 16), None, "cap", torch.float32),
        ((20, 16, 8), 70, None, torch.bfloat16),
    ],
)
def test_latents_are_read_in_place_as_the_reference_reads_them(shape, window, scores, dtype):
    heads, rank, rotated = shape
    spans = [
        span(1, 0, 1, [3]),
        span(2, 140, 1, [9, 2, 17, 4, 5, 6, 7, 8, 1]),
        span(3, 20, 5, [20, 21]),
        span(4, 16, 1, [24, 23], write_kv=False),
        span(5, 130, 19, [0, 10, 11, 12, 13, 14, 15, 16, 18, 19]),
        span(6, 0, 65, [25, 26, 27, 28, 29]),  # too long for the kernel
        span(7, 600, 1, [*range(5, 43)]),  # split
    ]
    options = options_of(0.2, window, scores, heads)
    agree(heads, rank + rotated, options, spans, rank=rank, dtype=dtype)


LONG = [(1, 25, 70, [3, 1, 2, 4, 5, 6]), (2, 0, 66, [7, 8, 9, 10, 11])]


@in_child
def test_long_spans_of_latents_are_gathered_a_few_queries_at_a_time(monkeypatch):
    monkeypatch.setattr(paged, "_TILE_SCORES", 8 * 40)
    agree(8, 24, AttentionOptions(scaling=0.2), [span(*one) for one in LONG], rank=16)


@in_child
@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("scores", ["cap", "sinks"])
def test_long_spans_with_caps_or_sinks_compute_few_scores_at_once(scores, window, monkeypatch):
    """All at once are 6 GB for a chunk of 512 over 32k keys of 32 heads."""
    limit = 6 * 100 * 3
    monkeypatch.setattr(paged, "_TILE_SCORES", limit)
    sizes = []

    def noted(query, key, *others):
        sizes.append(query.shape[0] * query.shape[1] * key.shape[0])
        return attend_dense(query, key, *others)

    monkeypatch.setattr(paged, "attend_dense", noted)
    heads = KV_HEADS * 3
    agree(heads, 16, options_of(0.3, window, scores, heads), [span(*one) for one in LONG])
    assert len(sizes) > 20 and max(sizes) <= limit


def graphs_of(runner, num_blocks, sizes, scratch):
    """Which a recording makes by calling its work again."""
    assert cuda_graphs(runner._attention, torch.device("cuda"))
    of = {"max_blocks": num_blocks, "block_size": BLOCK, "device": CPU, "batch_sizes": sizes}
    of |= {"record": lambda work: work, "scratch": scratch}
    return StepGraphs(runner._decode_logits, runner._attention, **of)


@pytest.fixture
def launched(monkeypatch):
    """The numbers of queries with which the kernel is launched."""
    seen, attend_paged = set(), paged.attend_paged

    def counted(query, *others, **fields):
        seen.add(query.shape[1])
        return attend_paged(query, *others, **fields)

    monkeypatch.setattr(paged, "attend_paged", counted)
    return seen


@in_child
@pytest.mark.parametrize("name", ["deepseek_v3", "lfm2", "gemma4_text"])
def test_models_of_latents_states_or_unlike_layers_decode_by_graphs_as_by_launches(name, launched):
    from tests.parity.architectures import served

    loaded = served(name)
    pools = [new_pool(loaded, 12) for _ in range(3)]
    reference = ReferenceAttention(pools[0], loaded.layers)
    runners = [ModelRunner(loaded, pools[0], reference)] + [
        ModelRunner(loaded, pool, paged.TritonAttention(pool, loaded.layers)) for pool in pools[1:]
    ]
    graphs = graphs_of(runners[2], 4, (2, 8), scratch=11)
    prompt = np.arange(5, 51, dtype=np.int32)
    answers = [r.step(Batch([Span(1, prompt, 0, [3, 4, 5, 6], True, PARAMS)])) for r in runners]
    runners[2]._graphs = graphs
    for step in range(46, 50):  # over a border of blocks
        spans = [Span(1, np.array([step], np.int32), step, [3, 4, 5, 6], True, PARAMS)]
        assert graphs.takes(spans)
        answers += [runner.step(Batch(spans)) for runner in runners]
    tail = [Span(1, np.arange(60, 65, dtype=np.int32), 50, [3, 4, 5, 6], True, PARAMS)]
    assert graphs.takes(tail) == (name != "lfm2")
    answers += [runner.step(Batch(tail)) for runner in runners]
    tokens = [sampled.token for (sampled,) in answers]
    assert tokens[0::3] == tokens[1::3] == tokens[2::3]
    assert {1, TAIL_QUERIES} == launched
    written = [pool[[3, 4, 5, 6]].nan_to_num() for pool in pools]
    torch.testing.assert_close(written[1], written[0], rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(written[2], written[0], rtol=1e-3, atol=1e-4)


@in_child
@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize("sinks", [False, True])
def test_a_sequence_cut_into_pieces_is_the_whole(window, sinks, monkeypatch):
    """Beside short ones, with several queries each, and where a window leaves little to see."""
    generator = torch.Generator().manual_seed(2)
    pool = torch.randn(40, 2, BLOCK, KV_HEADS, 16, generator=generator)
    query = torch.randn(3, 4, KV_HEADS * 3, 16, generator=generator)
    tables = torch.stack([torch.randperm(40, generator=generator) for _ in range(3)]).int()
    lengths, counts = (torch.tensor(n, dtype=torch.int32) for n in ([630, 7, 129], [4, 1, 3]))
    options = AttentionOptions(scaling=0.25, window=window)
    if sinks:
        options = options._replace(sinks=torch.linspace(-2, 5, KV_HEADS * 3))
    results = []
    for least, programs in ((1 << 20, 1), (64, 100), (64, 12)):
        monkeypatch.setattr(attention_pieces, "LEAST_KEYS", least)
        monkeypatch.setattr(attention_pieces, "PROGRAMS", programs)
        keys = PagedKeys(tables, lengths, counts)
        results.append(paged.attend_paged(query, pool, keys, options))
        for row, count in enumerate(counts.tolist()):
            results[-1][row, count:] = 0
    torch.testing.assert_close(results[1], results[0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(results[2], results[0], rtol=1e-5, atol=1e-6)


@in_child
def test_decode_steps_from_tensors_equal_those_from_spans():
    """Batches are filled up to a size."""
    loaded = tiny_model("qwen3")
    pools = [new_pool(loaded, 24) for _ in range(2)]
    runners = [ModelRunner(loaded, pool, paged.TritonAttention(pool)) for pool in pools]
    graphs = graphs_of(runners[1], 8, (1, 2, 4), scratch=23)
    graphs.warm_up()
    tables = [[3, 4, 5], [9, 1, 7], [20, 21]]
    prompts = [np.arange(5, 5 + length, dtype=np.int32) for length in (16, 33, 9)]
    for number, (prompt, table) in enumerate(zip(prompts, tables, strict=True)):
        for runner in runners:
            runner.step(Batch([Span(number, prompt, 0, table, True, PARAMS)]))
    runners[1]._graphs = graphs
    for step in range(3):
        spans = [
            Span(n, np.array([40 + n + step], np.int32), len(prompt) + step, table, True, PARAMS)
            for n, (prompt, table) in enumerate(zip(prompts, tables, strict=True))
        ]
        assert graphs.takes(spans)
        eager, replayed = (runner.step(Batch(spans[: 3 - step])) for runner in runners)
        assert eager == replayed
    padding = graphs._singles._values[3]
    assert [0, 0, 23, 0, 1, 1, 0, 0, 23] == padding[:9].tolist()
    assert not padding[9:].any(), "a row that fills a batch up attends to one key"
    written = [slot for table in tables for slot in table]
    assert torch.equal(pools[0][written].nan_to_num(), pools[1][written].nan_to_num())


@in_child
def test_the_warm_up_launches_the_kernel_in_both_of_its_forms(launched):
    """What is compiled in service stops everybody."""
    loaded = tiny_model()
    pool = new_pool(loaded, 4)
    ModelRunner(loaded, pool, paged.TritonAttention(pool)).warm_up()
    assert launched == {1, TAIL_QUERIES}


@in_child
def test_a_kernel_that_does_not_fit_is_given_up_before_serving(monkeypatch, caplog):
    def too_large(*_, **__):
        raise OutOfResources(106_752, 101_376, "shared memory")

    monkeypatch.setattr(paged, "attend_paged", too_large)
    loaded = tiny_model()
    pools = [new_pool(loaded, 8) for _ in range(2)]
    runners = [
        ModelRunner(loaded, pools[0], ReferenceAttention(pools[0])),
        ModelRunner(loaded, pools[1], paged.TritonAttention(pools[1])),
    ]
    runners[1].warm_up()
    assert "out of resource" in caplog.text
    prompt = np.arange(5, 25, dtype=np.int32)
    one, other = (r.step(Batch([Span(1, prompt, 0, [3, 4], True, PARAMS)])) for r in runners)
    assert one == other
    decode = [Span(1, np.array([40], np.int32), 20, [3, 4], True, PARAMS)]
    one, other = (runner.step(Batch(decode)) for runner in runners)
    assert one == other
