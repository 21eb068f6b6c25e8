"""A bound that tenants share: nobody takes it all, and what nobody wants is not left idle."""

import asyncio
import threading
from unittest.mock import Mock

from hypothesis import given
from hypothesis import strategies as st

from api.access.end_users import OTHERS, EndUsers
from api.access.fair_pool import FairPool
from api.access.shares import Shares
from api.errors import Overloaded, answer_to
from engine.scheduling.shares import Backlog, part_of


def taken(shares: Shares, tenant: str) -> int:
    while shares.take(tenant):
        pass
    return shares.held(tenant)


def test_each_tenant_that_comes_finds_room() -> None:
    shares = Shares(100)
    assert [75, 19, 5, 1] == [taken(shares, tenant) for tenant in ("a", "b", "c", "d")]
    assert 100 == shares.used


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(-5, 9))))
def test_what_is_held_sums_to_what_is_used(changes: list[tuple[str, int]]) -> None:
    shares = Shares(20)
    for tenant, amount in changes:
        if amount >= 0:
            shares.take(tenant, amount)
        else:
            shares.give_back(tenant, min(-amount, shares.held(tenant)))
        assert shares.used == sum(map(shares.held, "abc")) <= 20


def test_end_users_divide_what_their_tenant_may_hold() -> None:
    shares = Shares(1000)
    first = taken(shares, part_of("a", "1"))
    second = taken(shares, part_of("a", "2"))
    assert first < 750 and second > 0
    assert first + second == shares.held("a") <= 750
    assert taken(shares, "b") >= 150, "another tenant finds its room"
    shares.give_back(part_of("a", "1"), first)
    assert second == shares.held("a")


def test_a_backlog_divides_a_tenants_part_between_its_users() -> None:
    one, two = part_of("a", "1"), part_of("a", "2")
    storm = Backlog({one: 1000.0}, 10.0)
    assert storm.wait_s(two, 10) == 1.0, "as much as its own is served before it"
    assert storm.wait_s(one, 10) == 100.0
    both = Backlog({one: 1000.0, two: 10.0, "b": 1000.0}, 10.0)
    assert both.wait_s(two, 10) == (10 + 20 + 40) / 10, "half of its tenant, a quarter of all"


def test_end_users_are_bounded_and_those_beyond_are_one() -> None:
    now_s = [0.0]
    users = EndUsers(most=100, clock_s=lambda: now_s[0])
    names = [users.name("a", f"user {number}") for number in range(10_000)]
    assert (76, OTHERS) == (len(set(names)), names[-1])
    assert names[0] == users.name("a", "user 0") != users.name("a", "user 1")
    assert OTHERS != users.name("b", "user 0") == names[0], "another tenant finds room"
    now_s[0] = 61.0
    assert OTHERS != users.name("a", "user 9999")
    assert 1 == len(users)


class Gated:
    """A pool of one thread, whose calls wait for the gate."""

    def __init__(self, max_pending: int = 100) -> None:
        self.pool = FairPool(1, max_pending=max_pending, name="test", what="texts wait")
        self.gate = threading.Event()
        self.order: list[str] = []

    def start(self, tenant: str, name: str) -> "asyncio.Task[str]":
        def work() -> str:
            assert self.gate.wait(10)
            self.order.append(name)
            return name

        return asyncio.create_task(self.pool.run(tenant, work))


async def test_tenants_take_turns() -> None:
    gated = Gated()
    tasks = [gated.start("a", f"a{n}") for n in range(4)]
    tasks += [gated.start("b", f"b{n}") for n in range(2)] + [gated.start("c", "c0")]
    await asyncio.sleep(0)
    gated.gate.set()
    await asyncio.gather(*tasks)
    assert ["a0", "a1", "b0", "c0", "a2", "b1", "a3"] == gated.order
    assert 0 == gated.pool._shares.used
    gated.pool.close()


async def test_too_many_are_refused_at_once_and_another_tenant_is_not() -> None:
    gated = Gated(max_pending=4)
    tasks = [gated.start("a", f"a{n}") for n in range(5)] + [gated.start("b", "b0")]
    await asyncio.sleep(0)
    gated.gate.set()
    done = await asyncio.gather(*tasks, return_exceptions=True)
    refused = [error for error in done if isinstance(error, Overloaded)]
    assert 2 == len(refused)
    assert "4 texts wait" not in str(refused[0]) and "3 of them of this tenant" in str(refused[0])
    answer = answer_to(refused[0])
    assert (503, "1") == (answer.status, answer.headers["Retry-After"])
    assert "b0" in gated.order
    gated.pool.close()


async def test_who_leaves_while_waiting_gives_the_place_back() -> None:
    gated = Gated()
    running, waiting, last = (gated.start("a", f"a{n}") for n in range(3))
    await asyncio.sleep(0)
    waiting.cancel()
    running.cancel()  # its work goes on to the end
    await asyncio.wait([waiting, running])
    assert 2 == gated.pool._shares.used
    gated.gate.set()
    assert "a2" == await last
    assert ["a0", "a2"] == gated.order
    assert 0 == gated.pool._shares.used
    gated.pool.close()


async def test_a_call_that_fails_fails_its_caller_alone() -> None:
    fails = Mock(side_effect=ZeroDivisionError)
    pool = FairPool(2, max_pending=8, name="test", what="texts wait")

    results = await asyncio.gather(
        pool.run("a", fails), pool.run("a", lambda: 1), return_exceptions=True
    )
    assert isinstance(results[0], ZeroDivisionError)
    assert 1 == results[1]
    pool.close()
