"""The engine's face over vLLM: one `last` output for whatever ends a request, and a dead core.

vLLM itself is a stand-in here that has its `generate`, `errored` and `shutdown`; the real one runs
in `tests/vllm`.
"""

import asyncio
import queue
from array import array
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import closing
from types import SimpleNamespace
from typing import Any

import pytest

from cachesvc.server.vllm.engine import VllmEngine
from cachesvc.server.vllm.generate import VllmSettings
from engine.errors import EngineFailed, InvalidParameter, PromptTooLong, UnknownAdapter
from engine.request import FinishReason, Request, SamplingParams, StepOutput
from tiers.blocks.contents import Content
from tiers.blocks.keys import CacheScope

WAIT_S = 30.0


class Llm:
    """What the engine uses of AsyncLLM. Each sequence is answered by `script`."""

    def __init__(self, script: Callable[[str], AsyncIterator[Any]]) -> None:
        self.script = script
        self.errored = False
        self.dead_error = RuntimeError("the core is dead")
        self.asked: list[tuple[str, int, Any]] = []
        self.vllm_config = SimpleNamespace(
            model_config=SimpleNamespace(max_model_len=100),
            cache_config=SimpleNamespace(block_size=16),
            scheduler_config=SimpleNamespace(policy="priority"),
        )

    def shutdown(self, timeout: float) -> None:
        self.errored = False


def generate(llm: Llm, request: Request, index: int, name: str, priority: int) -> Any:
    """Asks the stand-in without vLLM's classes."""
    llm.asked.append((name, priority, request))
    return llm.script(name)


def made(tokens: list[int], finish: str | None = None, cached: int = 0) -> Any:
    part = SimpleNamespace(token_ids=tokens, finish_reason=finish, logprobs=None)
    return SimpleNamespace(outputs=[part], num_cached_tokens=cached, prompt_logprobs=None)


async def two_tokens(name: str) -> AsyncIterator[Any]:
    yield made([1], cached=16)
    yield made([2], "stop")


async def for_ever(name: str) -> AsyncIterator[Any]:
    yield made([1])
    while True:
        await asyncio.sleep(0.01)
        yield made([2])


async def nothing_yet(name: str) -> AsyncIterator[Any]:
    await asyncio.sleep(WAIT_S)
    yield made([1], "stop")


async def faulty(name: str) -> AsyncIterator[Any]:
    yield made([1])
    raise ValueError("a bug")


class House:
    def __init__(self, script: Callable[[str], AsyncIterator[Any]]) -> None:
        self.outputs: queue.Queue[StepOutput] = queue.Queue()
        self.llm = Llm(script)
        settings = VllmSettings(
            max_waiting=4,
            eos_token_ids=frozenset({0}),
            check_params=lambda params: None,
            adapters={},
        )
        self.engine = VllmEngine(
            lambda logger: self.llm, settings, self._hear, reports=None, generate=generate
        )
        self.engine.open()

    def _hear(self, outputs: Any) -> None:
        for output in outputs:
            self.outputs.put(output)

    def until_last(self) -> list[StepOutput]:
        heard = []
        while not heard or not heard[-1].last:
            heard.append(self.outputs.get(timeout=WAIT_S))
        return heard

    def close(self) -> None:
        self.engine.close()


@pytest.fixture
def house(request: pytest.FixtureRequest) -> Iterator[House]:
    with closing(House(request.param)) as running:
        yield running


def asked(
    name: str = "r", num_tokens: int = 32, n: int = 1, share: str = "a", **more: Any
) -> Request:
    return Request(
        request_id=name,
        tokens=array("i", range(num_tokens)),
        params=SamplingParams(n=n),
        scope=CacheScope(),
        share=share,
        **more,
    )


@pytest.mark.parametrize("house", [two_tokens], indirect=True)
def test_every_sequence_is_answered_and_the_prompt_is_counted_once(house: House) -> None:
    house.engine.submit(asked(n=3))
    heard = house.until_last()
    tokens = {i: [t for o in heard if o.index == i for t in o.tokens] for i in range(3)}
    assert {0: [1, 2], 1: [1, 2], 2: [1, 2]} == tokens
    assert {(32, 16)} == {(o.counts.prompt, o.counts.hit) for o in heard}
    assert 6 == heard[-1].counts.output
    assert [True] == [bool(o.miss_reasons) for o in heard if o.miss_reasons]
    assert ["r:0", "r:1", "r:2"] == [name for name, _, _ in house.llm.asked]


@pytest.mark.parametrize("house", [for_ever], indirect=True)
def test_an_abort_ends_a_request_and_counts_what_it_was_given(house: House) -> None:
    house.engine.submit(asked())
    first = house.outputs.get(timeout=WAIT_S)
    house.engine.abort("r")
    last = house.until_last()[-1]
    assert (FinishReason.ABORT, 32) == (last.finish, last.counts.prompt)
    assert last.counts.output >= first.counts.output == 1
    house.engine.abort("r")  # what has ended already is ignored
    house.engine.submit(asked())  # and its name is free again
    house.outputs.get(timeout=WAIT_S)


@pytest.mark.parametrize("house", [for_ever], indirect=True)
def test_one_sequence_is_ended_without_the_others(house: House) -> None:
    house.engine.submit(asked(n=2))
    while house.outputs.get(timeout=WAIT_S).index != 1:
        pass
    house.engine.abort("r", FinishReason.STOP, 0)
    ended = house.outputs.get(timeout=WAIT_S)
    while ended.finish is None:
        ended = house.outputs.get(timeout=WAIT_S)
    assert (0, FinishReason.STOP, False) == (ended.index, ended.finish, ended.last)
    house.engine.abort("r")
    last = house.until_last()[-1]
    assert (1, FinishReason.ABORT) == (last.index, last.finish)


@pytest.mark.parametrize("house", [nothing_yet], indirect=True)
@pytest.mark.parametrize("n", [1, 2])
def test_a_request_that_was_ended_before_it_began_costs_nothing(house: House, n: int) -> None:
    house.engine.submit(asked(n=n))
    house.engine.abort("r")
    [last] = house.until_last()
    assert (FinishReason.ABORT, 0) == (last.finish, last.counts.prompt)
    assert 0.0 == house.engine.predicted_wait_s("a", 10)


@pytest.mark.parametrize("house", [faulty], indirect=True)
def test_a_fault_in_one_request_fails_that_request(house: House) -> None:
    house.engine.submit(asked())
    last = house.until_last()[-1]
    assert FinishReason.ERROR is last.finish
    assert "ValueError" in (last.error or "")
    assert house.engine.failure is None


@pytest.mark.parametrize("house", [for_ever], indirect=True)
def test_a_dead_core_fails_everything_and_the_engine(house: House) -> None:
    house.engine.submit(asked("one", n=2))
    house.engine.submit(asked("two"))
    house.outputs.get(timeout=WAIT_S)
    house.llm.errored = True
    last: set[str] = set()
    while last != {"one", "two"}:
        output = house.outputs.get(timeout=WAIT_S)
        if output.last:
            assert FinishReason.ERROR is output.finish
            assert "dead" in (output.error or "")
            last.add(output.request_id)
    assert house.engine.failure is house.llm.dead_error
    with pytest.raises(EngineFailed):
        house.engine.submit(asked("three"))


@pytest.mark.parametrize("house", [for_ever], indirect=True)
def test_a_close_ends_what_runs(house: House) -> None:
    house.engine.submit(asked())
    house.outputs.get(timeout=WAIT_S)
    house.engine.close()
    assert FinishReason.ABORT is house.until_last()[-1].finish


@pytest.mark.parametrize("house", [nothing_yet], indirect=True)
def test_who_asks_much_waits_behind_who_asks_little(house: House) -> None:
    for name, share in (("r1", "much"), ("r2", "much"), ("r3", "much"), ("r4", "little")):
        house.engine.submit(asked(name, 90, share=share))
    while len(house.llm.asked) < 4:
        pass
    priorities = {name: priority for name, priority, _ in house.llm.asked}
    assert priorities["r1:0"] < priorities["r2:0"] < priorities["r3:0"]
    assert priorities["r4:0"] < priorities["r2:0"]


@pytest.mark.parametrize("house", [two_tokens], indirect=True)
def test_what_cannot_be_served_is_refused_by_name(house: House) -> None:
    with pytest.raises(PromptTooLong, match="at most 99"):
        house.engine.submit(asked(num_tokens=100))
    with pytest.raises(UnknownAdapter, match="loaded: none"):
        house.engine.submit(asked(adapter="sql"))
    content = Content(start=0, length=4, digest=b"x" * 16)
    with pytest.raises(InvalidParameter, match="embedded"):
        house.engine.submit(asked(contents=(content,)))
