"""The engine's face over one at a URL: one `last` output for whatever ends a request.

HTTP is a stand-in here that has what the engine uses of it.
"""

import asyncio
import queue
import threading
from collections.abc import AsyncGenerator, Callable
from contextlib import closing
from dataclasses import replace
from typing import Any, cast

import pytest

from engine import errors
from engine.remote import upstreams
from engine.remote.engine import RemoteEngine
from engine.remote.metrics import counters_in, labels_in
from engine.remote.sglang import SGLang
from engine.remote.upstreams import Remote, Upstream, Upstreams
from engine.remote.vllm import TAG, Completions
from engine.request import FinishReason, SamplingParams
from engine.settings import EngineSettings
from tests.support.requests import request
from tiers.blocks.contents import Content
from tiers.errors import MissReason
from tiers.remote.breaker import FAILURES, Breaker

WAIT_S = 30.0
Event = dict[str, Any]
LET = threading.Event()
Script = Callable[[str], AsyncGenerator[Event]]


class Http:
    """Each sequence is answered by `script`."""

    url = "http://engine"

    def __init__(self, script):
        self.script = script
        self.asked = []

    async def events(self, path, body, sent):
        name = body["kv_transfer_params"][TAG]["id"]
        self.asked.append((name, body))
        sent()
        async for event in self.script(name):
            yield event

    async def ask(self, method, path):
        return 200, ""

    async def close(self):
        """Nothing is open."""


def made(tokens, finish=None):
    return {"choices": [{"token_ids": tokens, "finish_reason": finish}]}


def usage(prompt, cached):
    details = {"cached_tokens": cached}
    return {"choices": [], "usage": {"prompt_tokens": prompt, "prompt_tokens_details": details}}


async def two_tokens(name):
    yield made([1])
    yield made([2], "stop")
    yield usage(32, 16)


async def for_ever(name):
    yield made([1])
    while True:
        await asyncio.sleep(0.01)
        yield made([2])


async def nothing_yet(name):
    await asyncio.sleep(WAIT_S)
    yield made([1], "stop")


async def when_let(name):
    while not LET.is_set():
        await asyncio.sleep(0.01)
    yield made([1], "stop")


async def failing(name):
    yield made([1], "error")


async def refused(name):
    raise errors.RemoteFault("The engine answered 500.")
    yield {}


async def all_but_the_stuck(name):
    async for event in nothing_yet(name) if name.startswith("stuck") else two_tokens(name):
        yield event


async def faulty(name):
    yield made([1])
    raise ValueError("a bug")


def upstream(http, remote):
    async def find():
        return remote

    return Upstream(cast(Any, http), remote, find=find)


class House:
    def __init__(self, script, num_engines=1):
        self.now_s = 1
        self.outputs = queue.Queue()
        self.https = [Http(script) for _ in range(num_engines)]
        self.http = self.https[0]
        remote = Remote(
            protocol=Completions(priorities=True, grammars=False, tagged=True),
            model="m",
            max_tokens=100,
            block_size=16,
        )
        upstreams = [upstream(http, remote) for http in self.https]
        self.engine = RemoteEngine(
            upstreams,
            self._hear,
            EngineSettings(max_waiting=4, eos_token_ids=frozenset({0})),
            clock_ns=lambda: self.now_s * 10**9,
        )
        self.engine.use(cast(Any, object()), lambda: cast(Any, None))
        self.engine.start()

    def _hear(self, outputs):
        for output in outputs:
            self.outputs.put(output)

    def until_last(self):
        heard = []
        while not heard or not heard[-1].last:
            heard.append(self.outputs.get(timeout=WAIT_S))
        return heard

    def close(self):
        self.engine.close()


@pytest.fixture
def house(request):
    with closing(House(request.param)) as running:
        yield running


def asked(name="r", num_tokens=32, n=1, share="a", max_tokens=None, **more):
    params = SamplingParams(n=n, max_tokens=max_tokens)
    return request(range(num_tokens), name, params=params, share=share, **more)


@pytest.mark.parametrize("house", [two_tokens], indirect=True)
def test_every_sequence_is_answered_and_the_prompt_is_counted_once(house):
    house.engine.submit(asked(n=3))
    heard = house.until_last()
    tokens = {i: [t for o in heard if o.index == i for t in o.tokens] for i in range(3)}
    assert {0: [1, 2], 1: [1, 2], 2: [1, 2]} == tokens
    assert {32} == {o.counts.prompt for o in heard}
    assert (16, 6) == (heard[-1].counts.hit, heard[-1].counts.output)
    assert [{MissReason.TAIL: 16}] == [o.miss_reasons for o in heard if o.miss_reasons]
    assert ["r:0", "r:1", "r:2"] == [name for name, _ in house.http.asked]


def test_an_engine_that_came_later_is_not_given_what_it_would_drop():
    """Those that were there when a request came can do what it asks."""
    remote = Remote(protocol=SGLang(deterministic=False), model="m", max_tokens=9, block_size=16)
    able = replace(remote, protocol=Completions(priorities=True, grammars=False))
    first, late = (upstream(Http(two_tokens), each) for each in (able, remote))
    engines, first.num_in_flight = Upstreams([first, late]), 1
    seeded = request(range(32), params=SamplingParams(seed=5))
    assert engines.pick(request=asked()) is late
    assert engines.pick(request=seeded) is first
    assert engines.pick(first, seeded) is None


def test_an_engine_is_asked_nothing_until_it_is_found_whatever_answers_before(monkeypatch, caplog):
    monkeypatch.setattr(upstreams, "JOIN_S", 0.0)
    monkeypatch.setattr(Breaker, "allows", lambda self: True)
    remote = Remote(protocol=SGLang(deterministic=False), model="m", max_tokens=9, block_size=16)
    answers, before = [KeyError("data"), remote], []

    async def find():
        before.append((engines.pick(), late.is_up))
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    late = Upstream(cast(Any, Http(two_tokens)), find=find, is_found=False)
    engines = Upstreams([late])
    asyncio.run(late.join())
    assert [(None, False)] * 2 == before
    assert engines.pick() is late and late.remote is remote
    assert "is not understood, nor used" in caplog.text


@pytest.mark.parametrize("found", [errors.EngineAway("x"), errors.AdapterError("x"), None])
def test_an_engine_that_denies_a_request_stays_while_it_may_serve_others(monkeypatch, found):
    """Its tenant alone may lack something there. See also the tests of the relay. One that is busy
    when it is asked about that is none that fails."""
    monkeypatch.setattr(upstreams, "JOIN_S", 0.0)
    looks = []

    async def find():
        looks.append(engine.is_up)
        if found:
            raise found
        raise errors.EngineAway("x") from errors.RemoteBusy("x")

    engine = Upstream(cast(Any, Http(two_tokens)), find=find)
    num_looks = 1 if found else 2 * FAILURES
    for _ in range(num_looks):
        for _ in range(4):
            engine.failed(errors.RemoteDenied("another key"))
        asyncio.run(engine.join())
    assert [True] * num_looks == looks and engine.is_up


@pytest.mark.parametrize("house", [for_ever], indirect=True)
def test_an_abort_ends_a_request_and_counts_what_it_was_given(house):
    house.engine.submit(asked())
    first = house.outputs.get(timeout=WAIT_S)
    house.engine.abort("r")
    last = house.until_last()[-1]
    assert (FinishReason.ABORT, 32) == (last.finish, last.counts.prompt)
    assert last.counts.output >= first.counts.output == 1
    assert {MissReason.UNREPORTED: 32} == last.miss_reasons
    house.engine.abort("r")  # what has ended already is ignored
    house.engine.submit(asked())  # and its name is free again
    house.outputs.get(timeout=WAIT_S)


@pytest.mark.parametrize("house", [for_ever], indirect=True)
def test_one_sequence_is_ended_without_the_others(house):
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
def test_a_request_that_was_ended_before_it_began_costs_nothing(house, n):
    both_came = threading.Event()
    house.engine.call(lambda _: both_came.wait(WAIT_S))
    house.engine.submit(asked(n=n))
    house.engine.abort("r")
    both_came.set()
    [last] = house.until_last()
    assert (FinishReason.ABORT, 0) == (last.finish, last.counts.prompt)


@pytest.mark.parametrize("house", [failing], indirect=True)
def test_an_end_that_the_engine_calls_an_error_is_one(house):
    house.engine.submit(asked())
    last = house.until_last()[-1]
    assert (FinishReason.ERROR, (1,)) == (last.finish, last.tokens)
    assert "ended the request with an error" in (last.error or "")


@pytest.mark.parametrize("house", [two_tokens], indirect=True)
def test_of_a_request_for_no_tokens_the_one_that_is_made_is_dropped(house):
    house.engine.submit(asked(max_tokens=0))
    [last] = house.until_last()
    assert ((), 32, 0) == (last.tokens, last.counts.prompt, last.counts.output)


@pytest.mark.parametrize("house", [refused], indirect=True)
def test_a_fault_before_the_answer_ends_every_sequence_of_a_request(house):
    house.engine.submit(asked(n=3))
    [last] = house.until_last()
    assert (FinishReason.ERROR, True) == (last.finish, last.last)
    assert "answered 500" in (last.error or "")


@pytest.mark.parametrize("house", [all_but_the_stuck], indirect=True)
def test_the_predicted_wait_is_of_the_prompts_that_have_not_begun(house):
    """At the rate at which others begin: here 128 tokens in two seconds."""
    house.engine.submit(asked("stuck", 90))
    assert 0.0 == house.engine.predicted_wait_s("a", 10), "the rate is unknown"
    for number in range(5):
        house.engine.submit(asked(f"r{number}"))
        house.until_last()
        house.now_s = 3
    assert 0.0 < house.engine.predicted_wait_s("a", 10) < 10
    house.engine.abort("stuck")
    house.until_last()
    assert 0.0 == house.engine.predicted_wait_s("a", 10)


@pytest.mark.parametrize("house", [when_let], indirect=True)
def test_a_sequence_that_was_ended_before_it_began_is_never_asked_for(house):
    """It waits for the first one to fill the cache."""
    LET.clear()
    house.engine.submit(asked(n=3))
    house.engine.abort("r", FinishReason.STOP, 1)
    house.engine.call(lambda operations: None).result(WAIT_S)  # the abort has come
    LET.set()
    assert [0, 2] == sorted(output.index for output in house.until_last())
    assert ["r:0", "r:2"] == [name for name, _ in house.http.asked]


@pytest.mark.parametrize("house", [faulty], indirect=True)
def test_a_fault_in_one_request_fails_that_request(house):
    house.engine.submit(asked())
    last = house.until_last()[-1]
    assert FinishReason.ERROR is last.finish
    assert "cannot be read" in (last.error or "")
    assert house.engine.failure is None


@pytest.mark.parametrize("house", [for_ever], indirect=True)
def test_an_engine_that_has_ended_fails_everything_and_the_engine(house):
    house.engine.submit(asked("one", n=2))
    house.engine.submit(asked("two"))
    house.outputs.get(timeout=WAIT_S)
    house.engine.fail(dead := RuntimeError("the core is dead"))
    last = set()
    while last != {"one", "two"}:
        output = house.outputs.get(timeout=WAIT_S)
        if output.last:
            assert FinishReason.ERROR is output.finish
            assert "dead" in (output.error or "")
            last.add(output.request_id)
    assert house.engine.failure is dead
    with pytest.raises(errors.EngineFailed):
        house.engine.submit(asked("three"))


@pytest.mark.parametrize("house", [for_ever], indirect=True)
def test_a_close_ends_what_runs(house):
    house.engine.submit(asked())
    house.outputs.get(timeout=WAIT_S)
    house.engine.close()
    assert FinishReason.ABORT is house.until_last()[-1].finish


@pytest.mark.parametrize("house", [nothing_yet], indirect=True)
def test_who_asks_much_waits_behind_who_asks_little(house):
    for name, share in (("r1", "much"), ("r2", "much"), ("r3", "much"), ("r4", "little")):
        house.engine.submit(asked(name, 90, share=share))
    while len(house.http.asked) < 4:
        pass
    priorities = {name: body["priority"] for name, body in house.http.asked}
    assert priorities["r1:0"] < priorities["r2:0"] < priorities["r3:0"]
    assert priorities["r4:0"] < priorities["r2:0"]


def test_the_engine_with_the_fewest_requests_gets_the_next_and_all_of_its_sequences():
    with closing(House(for_ever, num_engines=2)) as house:
        for name, n in {"a": 2, "b": 1, "c": 1}.items():
            house.engine.submit(asked(name, n=n))
            begun = set()
            while len(begun) < n:
                output = house.outputs.get(timeout=WAIT_S)
                begun |= {output.index} if output.request_id == name else set()
        names = [[name for name, _ in http.asked] for http in house.https]
        assert [["a:0", "a:1"], ["b:0", "c:0"]] == names
        assert [2, 2] == [each.num_in_flight for each in house.engine.stats().engines]


@pytest.mark.parametrize("house", [two_tokens], indirect=True)
def test_what_cannot_be_served_is_refused_by_name(house):
    with pytest.raises(errors.PromptTooLong, match="at most 99"):
        house.engine.submit(asked(num_tokens=100))
    with pytest.raises(errors.UnknownAdapter, match="loaded: none"):
        house.engine.submit(asked(adapter="sql"))
    content = Content(start=0, length=4, digest=b"x" * 16)
    with pytest.raises(errors.InvalidParameter, match="embedded"):
        house.engine.submit(asked(contents=(content,)))


def test_an_engines_counters_are_summed_over_its_labels():
    text = '# HELP a\na{x="1",y="16"} 2.0\na{x="2"} 3\nb 1e3\nc NaN-ish x\n'
    assert {"a": 5.0, "b": 1000.0} == counters_in(text)
    assert {"x": "1", "y": "16"} == labels_in(text, "a")
