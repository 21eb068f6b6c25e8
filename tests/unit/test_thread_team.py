"""The team of arithmetic threads is halved beside busy neighbours, and grows afterwards."""

from dataclasses import dataclass, field

import pytest
import torch

from engine.execution.team import (
    IDLE,
    LONGEST_REST_S,
    WINDOW_S,
    ThreadTeam,
    processors_idle_s,
    thread_queued_s,
)


@dataclass
class Machine:
    """Steps of `WINDOW_S` whose thread gets `share` of a processor, waits for one for `queued` of
    the time, and for something else for the rest, while `idle` processors idle."""

    most: int = 2
    share: float = 1.0
    queued: float | None = None
    idle: float | None = 0.0
    now_s: float = 1000.0
    computed_s: float = 0.0
    queued_s: float = 0.0
    idled_s: float = 0.0
    sizes: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.team = ThreadTeam(
            self.most,
            resize=self.sizes.append,
            clock_s=lambda: self.now_s,
            cpu_s=lambda: self.computed_s,
            queued_s=lambda: None if self.queued is None else self.queued_s,
            idle_s=lambda: None if self.idle is None else self.idled_s,
        )

    def step(self, seconds: float = WINDOW_S) -> None:
        self.team.begin()
        self.computed_s += self.share * seconds
        self.queued_s += (self.queued or 0.0) * seconds
        self.wait(seconds)
        self.team.end()

    def wait(self, seconds: float) -> None:
        self.now_s += seconds
        self.idled_s += (self.idle or 0.0) * seconds


def test_a_team_that_gets_its_processors_stays_whole() -> None:
    machine = Machine(share=0.95)
    for _ in range(100):
        machine.step()
    assert (machine.team.size, machine.sizes) == (2, [])


def test_waiting_for_pythons_lock_is_no_crowd() -> None:
    """Beside the event loop a step may compute for half of its time on an idle machine."""
    machine = Machine(share=0.5, queued=0.1)
    for _ in range(100):
        machine.step()
    assert (machine.team.size, machine.sizes) == (2, [])


def test_a_thread_that_waits_for_its_processor_is_crowded() -> None:
    machine = Machine(share=0.5, queued=0.2)
    machine.step()
    assert machine.sizes == [1]


def test_a_crowded_team_is_halved_down_to_one() -> None:
    machine = Machine(most=7, share=0.6)
    for _ in range(5):
        machine.step()
    assert machine.sizes == [3, 1]


def test_short_steps_are_judged_together() -> None:
    machine = Machine(share=0.6)
    for _ in range(3):
        machine.step(WINDOW_S / 4)
    assert machine.sizes == []
    machine.step(WINDOW_S / 2)
    assert machine.sizes == [1]


def test_a_team_of_one_waits_until_a_processor_idles() -> None:
    machine = Machine(share=0.6)
    machine.step()
    machine.share, machine.idle = 1.0, IDLE - 0.1
    for _ in range(100):
        machine.step()
    assert machine.sizes == [1]
    machine.idle = IDLE + 0.1
    for _ in range(100):
        machine.step()
    assert machine.sizes == [1, 2]


def test_it_grows_in_time_that_the_engine_was_idle() -> None:
    machine = Machine(share=0.6)
    machine.step()
    machine.share, machine.idle = 1.0, 2.0
    machine.wait(60.0)
    machine.step()
    assert machine.sizes == [1, 2]


def test_one_crowd_takes_one_rest_however_far_it_halves() -> None:
    """Of sixteen threads it took 16 s, and the look after that counted what was busy before."""
    machine = Machine(most=16, share=0.6)
    while machine.team.size > 1:
        machine.step()
    crowded_until_s = machine.now_s
    machine.share, machine.idle = 1.0, 16.0
    while machine.team.size < 16:
        machine.step()
    assert 10.0 > machine.now_s - crowded_until_s


def test_a_crowd_of_minutes_is_over_when_it_is_over() -> None:
    machine = Machine(share=0.6, idle=2.0)
    while (
        machine.now_s < 1000.0 + 3 * LONGEST_REST_S
    ):  # growing in vain: the rest is at its longest
        machine.step()
    machine.idle = 0.0
    for _ in range(int(2 * LONGEST_REST_S / WINDOW_S)):
        machine.step()
    assert 1 == machine.team.size
    over_s, machine.share, machine.idle = machine.now_s, 1.0, 2.0
    while machine.team.size < 2:
        machine.step()
    assert 4.0 > machine.now_s - over_s


def test_growing_in_vain_is_tried_less_and_less_often() -> None:
    """Where the system does not tell what idles, or a limit of the container is what lacks."""
    for idle in (None, 2.0):
        machine = Machine(share=0.6, idle=idle)
        while machine.now_s < 1000.0 + 10 * LONGEST_REST_S:
            machine.step()
        assert machine.sizes[-1] == 1 or machine.sizes[-2] == 1
        assert 10 <= machine.sizes.count(2) <= 20


def test_a_step_that_fails_is_counted_too() -> None:
    machine = Machine(share=0.1)
    machine.team.begin()
    machine.wait(1.0)
    machine.team.end()
    assert machine.sizes == [1]


def test_the_size_changes_no_bit_of_a_layer() -> None:
    """Attention's and the norms' parts, at the sizes that a team may have."""
    torch.manual_seed(0)
    rows, weight = torch.randn(3, 3, 64), torch.randn(3, 700, 64)
    before = torch.get_num_threads()
    seen = []
    try:
        for size in (1, 2, 4):
            torch.set_num_threads(size)
            weights = torch.softmax(torch.bmm(rows, weight.transpose(1, 2)), -1)
            seen.append((torch.bmm(weights, weight), weight.pow(2).mean(-1)))
    finally:
        torch.set_num_threads(before)
    for other in seen[1:]:
        assert all(torch.equal(a, b) for a, b in zip(seen[0], other, strict=True))


def test_what_a_thread_waited_for_processors_only_grows() -> None:
    first, second = thread_queued_s(), thread_queued_s()
    if first is None or second is None:
        pytest.skip("this system does not tell")
    assert 0 <= first <= second


def test_what_processors_idled_only_grows() -> None:
    first, second = processors_idle_s(), processors_idle_s()
    if first is None or second is None:
        pytest.skip("this system does not tell")
    assert 0 < first <= second
