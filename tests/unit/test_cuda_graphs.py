"""Recording decode steps: what is recorded, and where it fails. Streams and graphs are
stand-ins."""

from contextlib import contextmanager
from typing import cast

import numpy as np
import pytest
import torch

import engine.execution.cuda_graphs as cuda_graphs_module
from engine.attention.base import RecordableAttention, ReferenceAttention, attend_dense
from engine.batch import Batch, Span
from engine.execution.cuda_graphs import Recorder, StepGraphs, batch_sizes, cuda_graphs
from engine.execution.grouped_rows import GroupedRows
from engine.execution.runner import ModelRunner
from engine.execution.traced import trace
from engine.request import SamplingParams
from tests.parity.architectures import served
from tests.support.models import new_pool
from tests.support.torch_calls import Recorder as Calls

triton = pytest.importorskip("engine.attention.triton", reason="triton is not installed")


class Stream:
    """Waits for nothing."""

    def wait_stream(self, other):
        pass


@pytest.fixture
def current(monkeypatch):
    """The thread's stream, as torch would leave it: ending a capture that failed raises before the
    stream is changed back."""
    streams = [Stream()]

    @contextmanager
    def on(stream):
        before, streams[0] = streams[0], stream
        yield
        streams[0] = before

    @contextmanager
    def capture(graph, pool):
        streams[0] = Stream()
        try:
            yield
        except RuntimeError as error:
            raise RuntimeError("capture_end: the capture was invalidated") from error

    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(torch.cuda, "graph", capture)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: streams[0])
    monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: streams.__setitem__(0, stream))
    monkeypatch.setattr(cuda_graphs_module, "_end_random_capture", lambda: None)
    return streams


def test_a_failed_capture_leaves_the_thread_on_its_own_stream(current):
    before, calls = current[0], []

    def work():
        calls.append(current[0])
        if len(calls) > 1:
            raise RuntimeError("operation not permitted when stream is capturing")
        return torch.zeros(1)

    with pytest.raises(RuntimeError, match="capture_end"):
        Recorder()(work)
    assert 2 == len(calls)
    assert before is current[0]


@pytest.mark.parametrize(
    ("max_running", "largest", "count"),
    [(1, 1, 1), (2, 2, 2), (3, 4, 3), (64, 64, 7), (65, 128, 8), (200, 256, 9)],
)
def test_a_graph_takes_as_many_sequences_as_may_run(max_running, largest, count):
    sizes = batch_sizes(max_running)
    assert (largest, count) == (sizes[-1], len(sizes))
    assert largest / 2 < max_running <= largest


def _graphs(runner, sizes, *, scratch, record=lambda work: work):
    """On a CPU, where a recording calls its work again."""
    of = {"max_blocks": 4, "block_size": 16, "device": torch.device("cpu"), "batch_sizes": sizes}
    attention = cast(RecordableAttention, runner._attention)
    return StepGraphs(runner._decode_logits, attention, **of, record=record, scratch=scratch)


def triton_runner(name):
    loaded = served(name)
    pool = new_pool(loaded, 8).nan_to_num(0.5)
    return ModelRunner(loaded, pool, triton.TritonAttention(pool, loaded.layers))


WAITS = {"_local_scalar_dense", "nonzero", "masked_select", "is_nonzero"}  # for values of a tensor


@pytest.mark.parametrize(
    "name", ["qwen3", "deepseek_v3", "gemma3_text", "gemma4_text", "gpt_oss", "lfm2", "lfm2_moe"]
)
def test_a_decode_step_waits_for_nothing_that_it_computes(name, monkeypatch):
    """A capture refuses to wait, and then a model is served without graphs."""

    def attend(query, *_, rank):
        return query if rank is None else query[..., :rank]

    monkeypatch.setattr(triton, "attend_paged", attend)
    runner = triton_runner(name)
    assert cuda_graphs(runner._attention, torch.device("cuda"))
    graphs = _graphs(runner, (2,), scratch=7)
    params = SamplingParams(temperature=0)
    spans = [Span(1, np.array([40], np.int32), 33, [3, 4, 5], True, params)]
    with Calls() as calls:
        graphs.run(spans)
    assert WAITS.isdisjoint(calls.calls), calls.calls


def test_models_whose_steps_the_host_shapes_get_no_graphs():
    """A recurrent state is a tensor of its sequence."""
    runner = triton_runner("qwen3_next")
    assert not cuda_graphs(runner._attention, torch.device("cuda"))


def _attend_in_torch(query, pages, keys, options, **_):
    """What the kernel computes, of a few queries for each row."""
    outputs = []
    counts = [1] * len(query) if keys.counts is None else keys.counts.tolist()
    for row, (length, count) in enumerate(zip(keys.lengths.tolist(), counts, strict=True)):
        table = keys.tables[row].long()
        key, value = (pages[table, part].flatten(0, 1)[:length] for part in (0, 1))
        real = attend_dense(query[row, :count], key, value, length - count, options)
        outputs.append(torch.cat([real, torch.full_like(query[row, count:], torch.nan)]))
    return torch.stack(outputs)


@pytest.mark.parametrize("captured", [True, False])
def test_a_graph_runs_the_recorded_forward_if_it_can_be_captured(captured, monkeypatch, caplog):
    monkeypatch.setattr(triton, "attend_paged", _attend_in_torch)
    runner = triton_runner("qwen3")

    def record(work):
        if runner._traced is not None and runner._captures and not captured:
            raise RuntimeError("operation not permitted when stream is capturing")
        return work

    graphs = _graphs(runner, (2,), scratch=7, record=record)
    params = SamplingParams(temperature=0)
    spans = [Span(n, np.array([40], np.int32), 20, [n, 3 + n], True, params) for n in (1, 2)]
    own = graphs.run(spans)
    runner._traced = trace(runner._model)
    graphs.forget()
    runner._graphs = graphs
    runner.warm_up()
    assert captured != ("graphs do without it" in caplog.text)
    if captured:
        for layer in runner._model.base_model.layers:
            monkeypatch.setattr(layer, "forward", None)
    assert graphs.takes(spans) and torch.equal(own, graphs.run(spans))


@pytest.mark.parametrize(
    ("count", "write_kv", "beside"),
    [(5, True, 1), (1, False, 1), (3, False, 1), (19, True, 1), (8, True, 16), (9, False, 20)],
)
def test_a_tail_is_computed_by_a_graph_as_by_a_step(count, write_kv, beside, monkeypatch):
    """A question after a cached prompt, beside a sequence that decodes. Each of its rows sees the
    ones before it, and what is not to be written stays as it is."""
    monkeypatch.setattr(triton, "attend_paged", _attend_in_torch)
    loaded = served("qwen3")
    pool = new_pool(loaded, 6 + 2 * beside)
    attention = triton.TritonAttention(pool, loaded.layers)
    runner = ModelRunner(loaded, pool, ReferenceAttention(pool, loaded.layers))
    params = SamplingParams(temperature=0)

    def span(number, first, count, table, write=True):
        tokens = np.arange(first, first + count, dtype=np.int32) * 37 % loaded.vocab_size
        return Span(number, tokens, first, table, True, params, write_kv=write)

    others = [(2 + number, [5 + 2 * number, 6 + 2 * number]) for number in range(beside)]
    prompts = [span(number, 0, 20, table) for number, table in others]
    runner.step(Batch([span(1, 0, 40, [3, 1, 2, 0]), *prompts]))
    if not write_kv:  # of a prompt that is cached whole, the last tokens are computed again
        runner.step(Batch([span(1, 40, count, [3, 1, 2, 0])]))
        pool[2, :, :, 8:] += 1  # what is read is what is there
    tail = span(1, 40, count, [3, 1, 2, 0], write_kv)
    spans = [*(span(number, 20, 1, table) for number, table in others), tail]
    before = pool.clone()
    with torch.inference_mode():
        expected, _ = runner._forward(spans)
    left = pool.clone()
    pool.copy_(before)
    runner._attention = attention
    graphs = _graphs(runner, (2, 32), scratch=4)
    graphs.warm_up()
    wide = span(1, 40, 24, [3, 1, 2, 0])  # whose rows must not be written once more
    assert graphs.takes([wide]) and graphs.takes(spans)
    graphs.run([wide])
    pool.copy_(before)
    torch.testing.assert_close(graphs.run(spans), expected, rtol=1e-4, atol=1e-4)
    pool[4] = left[4]  # scratch
    torch.testing.assert_close(pool, left, rtol=1e-4, atol=1e-4, equal_nan=True)
    whole = [3, 1] if write_kv else [3, 1, 2, 0]
    assert torch.equal(pool[whole].nan_to_num(), before[whole].nan_to_num())


@pytest.mark.parametrize("width", [1, 8])
def test_tables_begin_where_those_of_launched_steps_do(width):
    """Triton compiles another form of a kernel for addresses that are no multiples of 16."""
    rows = GroupedRows(width, (1, 2), 9, block_size=16, scratch=5, device=torch.device("cpu"))
    rows.pad(2)
    _, _, decode = rows.read(2)
    assert decode.tables.data_ptr() % 16 == 0
    assert decode.tables[:, 0].tolist() == [5, 5]


def test_tails_that_no_graph_serves_better_are_launched(monkeypatch):
    """Too many rows, too many keys to read again for each row, or states that enter the pool at a
    step's end."""
    params = SamplingParams(temperature=0)

    def graphs(name):
        runner = triton_runner(name)
        attention = runner._attention
        assert cuda_graphs(attention, torch.device("cuda"))
        sizes = batch_sizes(4, tails=attention.sees_its_step)
        return _graphs(runner, sizes, scratch=7)

    def tail(count, start=30):
        return [Span(1, np.zeros(count, np.int32), start, [0], True, params)]

    plain, stateful = graphs("qwen3"), graphs("lfm2")
    assert plain.takes(tail(2)) and plain.takes(tail(128))
    assert not plain.takes(tail(129))
    assert plain.takes(tail(64, 130_000)) and plain.takes(tail(128, 30_000))
    assert not plain.takes(tail(65, 130_000))
    decoding = [Span(2 + n, np.zeros(1, np.int32), 30, [0], True, params) for n in range(16)]
    assert plain.takes([*decoding, *tail(16, 30_000)])  # row by row
    assert not plain.takes([*decoding, *tail(64, 30_000)])
    assert stateful.takes(tail(1)) and not stateful.takes(tail(2))
