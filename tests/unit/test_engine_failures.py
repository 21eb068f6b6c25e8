"""What fails in a step, a command or a grammar fails its own request; a dead engine says so."""

import threading
from unittest.mock import Mock

import pytest

from engine.answers import STEP_FAILED
from engine.engine import MAX_FAILURES, Engine
from engine.errors import EngineClosed, EngineFailed
from engine.request import FinishReason
from engine.settings import EngineSettings
from tests.patience import until
from tests.sim.world import World
from tests.support.caches import cache_of
from tests.support.chain_runner import ChainRunner, chain_layout
from tests.support.requests import request

LAYOUT = chain_layout(4)


class Breakable(ChainRunner):
    """Fails steps with a token that is `bad`, and all of them when `dead`."""

    bad = 13
    dead = False

    def step(self, batch):
        self.probe()
        if any(self.bad in span.tokens for span in batch.spans):
            raise ValueError("thirteen")
        return super().step(batch)

    def probe(self):
        if self.dead:
            raise RuntimeError("the device is gone")


class House:
    """An engine on its own thread, and what it has answered."""

    def __init__(self, *, started=True):
        self.outputs = {}
        cache = cache_of(LAYOUT, 64)
        self.runner = Breakable(cache.pool.tensor)
        self.engine = Engine(self.runner, cache, EngineSettings(), self._take)
        if started:
            self.engine.start()

    def ask(self, name, *tokens, **fields):
        self.outputs[name] = []
        self.engine.submit(request(tokens, name, **fields))

    def answer(self, name):
        """The last output of a request."""
        until(lambda: bool(self.outputs[name]) and self.outputs[name][-1].last)
        return self.outputs[name][-1]

    def _take(self, outputs):
        for output in outputs:
            self.outputs[output.request_id].append(output)


@pytest.fixture
def house():
    house = House()
    yield house
    house.engine.close()
    house.engine._cache.close()


def test_a_request_that_breaks_every_step_ends_alone_however_often_it_comes(house):
    for turn in range(2 * MAX_FAILURES):
        house.ask(f"bad{turn}", 1, 13)
        failed = house.answer(f"bad{turn}")
        assert (FinishReason.ERROR, STEP_FAILED) == (failed.finish, failed.error)
    house.ask("good", 1, 2)
    assert FinishReason.LENGTH is house.answer("good").finish
    assert house.engine.failure is None


def test_what_was_computed_without_a_number_is_not_kept():
    """Nor what stood before the logits told: of five chunks, four were committed by then."""
    world = World(device_blocks=100, step_tokens=8)
    world.runner.mad.add("bad")
    world.submit("bad", list(range(40)), max_tokens=2)
    world.run()
    world.settle()
    world.submit("good", list(range(40)), max_tokens=2)
    world.run()
    world.check()
    world.check_idle()
    assert 0 == world.counts("good").hit


def test_a_grammar_that_cannot_begin_fails_its_request_alone(house):
    broken = Mock(begin=Mock(side_effect=MemoryError("no room for a matcher")))
    house.ask("broken", 1, 2, grammar=broken)
    assert FinishReason.ERROR is house.answer("broken").finish
    house.ask("broken", 1, 2)  # its name is free again
    assert FinishReason.LENGTH is house.answer("broken").finish


def test_a_command_that_fails_does_not_end_the_engine(house):
    for _ in range(2 * MAX_FAILURES):
        house.engine._post(Mock(side_effect=RuntimeError("a fault in a command")))
    house.ask("good", 1, 2)
    assert house.answer("good").last
    assert house.engine.failure is None


def test_a_dead_engine_answers_everybody_and_says_so(house):
    house.runner.dead = True
    for turn in range(MAX_FAILURES):
        house.ask(f"r{turn}", 1, 2)
        assert FinishReason.ERROR is house.answer(f"r{turn}").finish
    until(lambda: house.engine.failure is not None)
    assert "the device is gone" in (house.engine.stats().failed or "")
    with pytest.raises(EngineFailed, match="the device is gone"):
        house.ask("late", 1, 2)
    with pytest.raises(EngineFailed):
        house.engine.call(lambda cache: None).result(timeout=5)


def test_a_warm_up_that_fails_is_told_to_who_starts_the_engine():
    house = House(started=False)

    with pytest.raises(RuntimeError, match="no kernel"):
        house.engine.start(Mock(side_effect=RuntimeError("no kernel for this device")))
    house.engine.close()


def test_the_engine_warms_up_on_the_thread_that_computes():
    """Where libgomp keeps the threads of arithmetic: another thread's would slow them."""
    house, seen = House(started=False), []
    house.engine.start(lambda: seen.append(threading.current_thread().name))
    assert ["cachesvc-engine"] == seen
    house.engine.close()


@pytest.mark.parametrize("started", [False, True])
def test_a_call_to_an_engine_that_has_ended_is_answered(*, started):
    """Before, its future stayed open, and who waited for it waited for ever."""
    house = House(started=started)
    house.engine.close()
    with pytest.raises(EngineClosed):
        house.engine.call(lambda cache: None).result(timeout=5)


def test_a_call_behind_the_stop_is_answered(house):
    house.engine._post(house.engine._stop)
    until(lambda: not house.engine._thread.is_alive())
    late = house.engine.call(lambda cache: None)
    house.engine.close()
    with pytest.raises(EngineClosed):
        late.result(timeout=5)
