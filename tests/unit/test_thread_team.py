"""The team of arithmetic threads is the size that is fastest, for each kind of step."""

import platform
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.execution import team
from engine.execution.waiting import WINDOW_S, Waiting
from engine.openmp import TURN_NS, allowed_processors
from tests.support.threads import beside

SCHED = Path("/proc/thread-self/sched")


class Machine:
    """Steps that take `seconds(rows, threads)`."""

    def __init__(self, seconds: Callable[[int, int], float], most: int = 2) -> None:
        self.seconds, self.most = seconds, most
        self.now_s = 1000.0
        self.team = team.ThreadTeam(most, resize=lambda _: None, clock_s=lambda: self.now_s)
        self.sizes: Counter[int] = Counter()
        self.keys = lambda: 0

    def steps(self, count: int, rows: int = 4) -> Counter[int]:
        """How many of the next steps were computed with each size."""
        sizes: Counter[int] = Counter()
        for _ in range(count):
            self.team.begin(rows, self.keys())
            sizes[self.team.size] += 1
            self.now_s += self.seconds(rows, self.team.size)
            self.team.end()
        return sizes


def idle(rows: int, threads: int) -> float:
    return rows / threads


def crowded(rows: int, threads: int) -> float:
    return rows / (1 if threads == 1 else 0.2)


def test_one_thread_computes_where_two_wait_for_each_other():
    machine = Machine(crowded)
    machine.steps(team.FIRST_REST + 12)
    assert machine.steps(1000)[1] > 990, "a trial that is hopeless ends soon"


def test_a_trial_of_a_size_that_is_somewhat_slower_takes_two_steps():
    machine = Machine(lambda rows, threads: rows / (1 if threads == 1 else 1.35))
    assert 2 == machine.steps(team.FIRST_REST + 16)[1]


@pytest.mark.parametrize(("best", "most"), [(1, 16), (2, 16), (3, 12), (8, 16), (16, 16)])
def test_the_best_size_is_found_on_a_large_machine(best, most):
    machine = Machine(lambda rows, threads: 1 + abs(threads - best) / 4, most)
    machine.steps(500)
    assert machine.steps(1000)[best] > 900


def test_kinds_of_steps_are_judged_apart():
    machine = Machine(lambda rows, threads: idle(rows, threads) if rows > 100 else 1.0)
    for _ in range(50):
        machine.steps(10, rows=4)
        machine.steps(1, rows=512)
    assert machine.steps(10, rows=4)[1] >= 10 - team.SAMPLE
    assert machine.steps(10, rows=512)[2] >= 9 - team.SAMPLE


def test_a_crowd_is_noticed_at_once_and_so_is_its_end():
    machine = Machine(idle)
    machine.steps(2000)
    machine.seconds = crowded
    assert machine.steps(200)[2] < team.LEAST_REST + 4 * team.SAMPLE
    machine.steps(2000)
    machine.seconds = idle
    assert machine.steps(team.LONGEST_REST + 100)[2] > 80


class Shared(Machine):
    """Steps on all processors of this machine, beside others that use `used` of them."""

    def __init__(self) -> None:
        self.used, self.used_s, self.seen_s = 0.0, 0.0, 1000.0
        cores = len(allowed_processors())
        super().__init__(self._seconds, max(2, cores))
        waiting = Waiting(others_s=self._others_s, running=lambda: None, clock_s=lambda: self.now_s)
        self.team = team.ThreadTeam(
            self.most, resize=lambda _: None, clock_s=lambda: self.now_s, waiting=waiting
        )

    def _others_s(self) -> float:
        self.used_s += self.used * (self.now_s - self.seen_s)
        self.seen_s = self.now_s
        return self.used_s

    def _seconds(self, rows: int, threads: int) -> float:
        alone = 0.02 * rows / threads
        return alone if self.used + threads <= self.most else 4 * alone


def test_a_larger_team_is_tried_again_once_others_have_left():
    machine = Shared()
    machine.used = machine.most - 1.0
    machine.steps(200)
    assert machine.steps(20)[1] == 20
    machine.used = 0.0
    machine.steps(int((team.CALM_S + WINDOW_S) / 0.08) + 40)
    assert machine.team.size > 1
    assert machine.steps(20)[1] == 0
    assert team.LEAST_REST < 40 < team.REST


def test_a_kind_of_step_that_is_new_knows_that_others_were_there():
    machine = Shared()
    machine.used = machine.most - 1.0
    machine.steps(200)
    machine.used, machine.now_s = 0.0, machine.now_s + 2 * team.CALM_S  # nobody asks meanwhile
    machine.keys = lambda: 50_000
    machine.steps(2 + team.SAMPLE)
    assert machine.steps(20)[1] == 0


def test_a_machine_of_one_processor_tries_nothing():
    machine = Machine(idle, most=1)
    assert machine.steps(500) == Counter({1: 500})


@pytest.mark.skipif(not SCHED.exists(), reason="the system does not tell")
def test_the_threads_of_a_team_take_short_turns():
    """Linux before 6.12 takes no notice."""
    turns: list[str] = []
    with beside(lambda: (team.ThreadTeam().begin(1, 1), turns.append(SCHED.read_text()))):
        takes_notice = tuple(map(int, platform.release().split(".")[:2])) >= (6, 12)
    assert takes_notice == (f": {TURN_NS:>20}\n" in turns[0])


@pytest.mark.parametrize("longest", [10, 100])
def test_steps_of_any_length_are_no_reason_for_endless_trials(longest):
    """Of one kind are steps over short contexts and over long ones."""
    lengths = random.Random(3)
    machine = Machine(lambda rows, threads: lengths.uniform(1, longest) / threads)
    assert machine.steps(5000)[1] < 5000 / 8


@given(
    st.lists(st.tuples(st.integers(1, 5000), st.floats(0, 100)), max_size=300), st.integers(1, 64)
)
def test_the_size_stays_within_its_bounds_whatever_steps_take(steps, most):
    machine = Machine(lambda rows, threads: 0.0, most)
    for rows, seconds in steps:
        machine.seconds = lambda *_, seconds=seconds: seconds
        (size,) = machine.steps(1, rows)
        assert 1 <= size <= most
