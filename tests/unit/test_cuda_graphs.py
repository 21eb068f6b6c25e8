"""Recording decode steps: what is recorded, and where it fails. Streams and graphs are
stand-ins."""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from engine.batch import Span
from engine.execution.cuda_graphs import DecodeGraphs, Recorder, batch_sizes, cuda_graphs
from engine.execution.runner import ModelRunner
from engine.request import SamplingParams
from tests.parity.architectures import served
from tests.support.models import new_pool
from tests.support.torch_calls import Recorder as Calls


class Stream:
    """Waits for nothing."""

    def wait_stream(self, other: object) -> None:
        pass


@pytest.fixture
def current(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The thread's stream, as torch would leave it: ending a capture that failed raises before the
    stream is changed back."""
    streams: list[object] = [Stream()]

    @contextmanager
    def on(stream: object) -> Iterator[None]:
        before, streams[0] = streams[0], stream
        yield
        streams[0] = before

    @contextmanager
    def capture(graph: object, pool: object) -> Iterator[None]:
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
    return streams


def test_a_failed_capture_leaves_the_thread_on_its_own_stream(current: list[object]) -> None:
    before, calls = current[0], []

    def work() -> torch.Tensor:
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
def test_a_graph_takes_as_many_sequences_as_may_run(
    max_running: int, largest: int, count: int
) -> None:
    sizes = batch_sizes(max_running)
    assert (largest, count) == (sizes[-1], len(sizes))
    assert largest / 2 < max_running <= largest


WAITS = {"_local_scalar_dense", "nonzero", "masked_select", "is_nonzero"}  # for values of a tensor


@pytest.mark.parametrize(
    "name", ["qwen3", "deepseek_v3", "gemma3_text", "gemma4_text", "gpt_oss", "lfm2", "lfm2_moe"]
)
def test_a_decode_step_waits_for_nothing_that_it_computes(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A capture refuses to wait, and then a model is served without graphs."""
    triton = pytest.importorskip("engine.attention.triton", reason="triton is not installed")

    def attend(query: torch.Tensor, *_: object, rank: int | None) -> torch.Tensor:
        return query if rank is None else query[..., :rank]

    monkeypatch.setattr(triton, "attend_paged", attend)
    loaded = served(name)
    pool = new_pool(loaded, 8)
    runner = ModelRunner(loaded, pool, triton.TritonAttention(pool, loaded.layers))
    assert cuda_graphs(runner._attention, torch.device("cuda"))
    graphs = DecodeGraphs(
        runner._decode_logits,
        runner._attention,
        max_blocks=4,
        block_size=16,
        device=torch.device("cpu"),
        batch_sizes=(2,),
        record=lambda work: work,
        scratch=7,
    )
    params = SamplingParams(temperature=0)
    spans = [Span(1, np.array([40], np.int32), 33, [3, 4, 5], True, params)]
    with Calls() as calls:
        graphs.run(spans)
    assert WAITS.isdisjoint(calls.calls), calls.calls


@pytest.mark.parametrize("name", ["deepseek_v32", "qwen3_next"])
def test_models_whose_steps_the_host_shapes_get_no_graphs(name: str) -> None:
    """An index picks keys by sequence, and a recurrent state is a tensor of its sequence."""
    triton = pytest.importorskip("engine.attention.triton", reason="triton is not installed")
    loaded = served(name)
    pool = new_pool(loaded, 8)
    runner = ModelRunner(loaded, pool, triton.TritonAttention(pool, loaded.layers))
    assert not cuda_graphs(runner._attention, torch.device("cuda"))
