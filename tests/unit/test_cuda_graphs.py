"""Recording decode steps, where the recording fails. Streams and graphs are stand-ins."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from engine.execution.cuda_graphs import Recorder, batch_sizes


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
