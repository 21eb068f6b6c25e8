"""A step waits for requests that usually follow the answers just given, and for no others; what it
gives prompts beside those who decode, and how it is timed."""

import random
import statistics
import threading
import time
import tracemalloc
from functools import partial
from heapq import heappop, heappush

import pytest

from engine.engine import Engine
from engine.scheduling.gathering import MOST_S, Gathering
from engine.settings import EngineSettings
from tests.sim.world import World
from tests.support.caches import cache_of
from tests.support.chain_runner import ChainRunner, chain_layout
from tests.support.requests import request
from tests.support.threads import beside
from tiers.transfer.economy import LoadEconomy

STEP_S, EACH_S = 0.03, 0.002  # what a step costs, and each of its requests
LAYOUT = chain_layout(4)


class Clients:
    """Requests to a server whose steps take `STEP_S` and `EACH_S` for each, on a clock of its own.

    With `again`, who is answered asks again after so many seconds, given how many were.
    """

    def __init__(self, *, gathers, again=None):
        self.now_s = 0.0
        self.gathering = Gathering(lambda: self.now_s) if gathers else None
        self.latencies = []
        self.sizes = []
        self._again = again
        self._coming = []

    def ask(self, *at_s):
        for one in at_s:
            heappush(self._coming, one)
        return self

    def run(self, until_s):
        waiting = []
        while self.now_s < until_s and (waiting or self._coming):
            waiting += self._arrived()
            if not waiting:
                self.now_s = self._coming[0]
            elif left_s := self.gathering.left_s(len(waiting)) if self.gathering else 0.0:
                self.now_s = min([self.now_s + left_s, *self._coming[:1]])
            else:
                self._step(waiting)
                waiting = []
        return self

    def _arrived(self):
        while self._coming and self._coming[0] <= self.now_s:
            if self.gathering:
                self.gathering.came(self._coming[0])
            yield heappop(self._coming)

    def _step(self, waiting):
        num, step_s = len(waiting), STEP_S + EACH_S * len(waiting)
        self.now_s += step_s
        self.sizes.append(num)
        self.latencies += [self.now_s - came_s for came_s in waiting]
        if self._again is not None:
            self.ask(*(self.now_s + self._again(num) for _ in waiting))
        if self.gathering:
            self.gathering.answered(num, step_s)


@pytest.mark.parametrize("num", [2, 3, 4, 8, 16])
def test_clients_that_ask_again_at_once_are_served_together(num):
    """However they began, and sooner than without a wait."""
    starts = [0.011 * number for number in range(num)]
    apart, together = (
        Clients(gathers=gathers, again=lambda num: 0.004 + 0.001 * num).ask(*starts).run(10)
        for gathers in (False, True)
    )
    assert set(apart.sizes[20:]) != {num}
    assert {num} == set(together.sizes[20:])
    assert statistics.mean(together.latencies) < 0.9 * statistics.mean(apart.latencies)
    assert len(together.latencies) > len(apart.latencies)


@pytest.mark.parametrize("rate", [1, 10, 30, 100, 300])
def test_requests_that_come_at_random_hardly_wait(rate):
    chance = random.Random(rate)
    at_s, now_s = [], 0.0
    while now_s < 60:
        now_s += chance.expovariate(rate)
        at_s.append(now_s)
    without, with_waits = (
        Clients(gathers=gathers).ask(*at_s).run(100).latencies for gathers in (False, True)
    )
    assert statistics.mean(with_waits) < 1.05 * statistics.mean(without)


def test_one_client_never_waits():
    alone = Clients(gathers=True, again=lambda num: 0.005).ask(0.0).run(5)
    assert pytest.approx([STEP_S + EACH_S] * len(alone.latencies)) == alone.latencies


def test_clients_that_leave_are_waited_for_a_few_times_at_most():
    """Of eight clients seven stop asking, and a stranger comes meanwhile."""
    now_s = 0.0
    gathering = Gathering(lambda: now_s)
    for _ in range(10):  # eight answers, and eight requests 10 ms later
        now_s += 0.05
        gathering.answered(8, 0.05)
        for _ in range(8):
            gathering.came(now_s + 0.01)
        assert gathering.left_s(8) == 0.0
    waited = []
    for _ in range(6):
        now_s += 1.0
        gathering.answered(8, 0.05)
        gathering.came(now_s)
        waited.append(gathering.left_s(1))
    assert waited[0] > 0
    assert waited[0] < 2 * 0.01
    assert waited[2:] == [0.0] * 4
    assert max(waited) <= MOST_S


def test_requests_submitted_before_the_answers_were_not_caused_by_them():
    now_s = 1.0
    gathering = Gathering(lambda: now_s)
    gathering.answered(2, 0.05)
    now_s = 1.05
    gathering.answered(2, 0.05)
    gathering.came(1.005)  # taken late: it followed the first answers
    gathering.came(1.006)
    assert gathering.left_s(2) > 0, "two more are expected 6 ms after the last answers"
    gathering.came(1.056)
    gathering.came(1.056)
    assert gathering.left_s(4) == 0.0


def test_requests_that_end_without_a_step_take_no_memory():
    """Such as those whose grammar matches nothing."""
    now_s = 1.0
    gathering = Gathering(lambda: now_s)
    gathering.answered(2, 0.05)
    tracemalloc.start()
    for number in range(100_000):
        gathering.came(1.0 + number)
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert taken < 10_000
    assert gathering.left_s(5) == 0.0


class Slow(ChainRunner):
    """Notes how many sequences each step has."""

    def __init__(self, *given):
        super().__init__(*given)
        self.sizes = []

    def step(self, batch):
        self.sizes.append(len(batch.spans))
        time.sleep(0.05)
        return super().step(batch)


def test_the_engine_gathers_clients_of_two_crowds():
    """Four clients on threads of their own, of whom one begins while the others are computed."""
    cache = cache_of(LAYOUT, 64)
    runner, answered = Slow(cache.pool.tensor), [threading.Event() for _ in range(4)]

    def take(outputs):
        for output in outputs:
            answered[int(output.request_id.split()[0])].set()

    engine = Engine(runner, cache, EngineSettings(), lambda outputs: take(list(outputs)))
    engine.start()

    def client(number):
        time.sleep(0.02 * (number == 0))
        for turn in range(24):
            answered[number].clear()
            engine.submit(request([number + 1], f"{number} {turn}"))
            assert answered[number].wait(10)

    with beside(*(partial(client, number) for number in range(4))):
        pass
    engine.close()
    cache.close()
    assert runner.sizes[0] < 4
    assert statistics.mode(runner.sizes) == 4


def test_prefill_is_timed_to_where_the_device_is_waited_for(monkeypatch):
    """Three chunks, of which only the last chooses a token: one observation of all of them."""
    world = World(device_blocks=100, step_tokens=16)
    seen: list[int] = []
    monkeypatch.setattr(
        LoadEconomy, "observe_prefill", lambda economy, tokens, seconds: seen.append(tokens)
    )
    world.submit("one", list(range(48)), max_tokens=2)
    world.run()
    assert [48] == seen


def chunks(num_decoding: int, num_waiting: int) -> int:
    """Prompt tokens of the step after `num_waiting` prompts came beside those who decode."""
    world = World(device_blocks=400, max_running=16, step_tokens=64)
    for number in range(num_decoding):
        world.submit(f"d{number}", [number] * 4, max_tokens=50)
    while any(world.phase(f"d{number}") != "decode" for number in range(num_decoding)):
        world.step()
    for number in range(num_waiting):
        world.submit(f"w{number}", [number + 20] * 80, max_tokens=1)
    before = world.engine.stats().prompt_tokens_computed
    while (computed := world.engine.stats().prompt_tokens_computed) == before:
        world.step()
    return computed - before


def test_the_more_wait_for_a_first_token_the_more_is_prefilled_beside_decoding():
    assert [32, 32, 64, 64] == [chunks(2, 1), chunks(2, 2), chunks(2, 4), chunks(1, 8)]
