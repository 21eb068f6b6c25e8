"""A server before an endpoint that fails: what the client sees, and that it settles once.

After each test every request that was admitted has one entry, nothing is held, and the books can
be proved.
"""

import asyncio
import contextlib
import random
import socket
from functools import partial

import orjson
import pytest

from api.relay import passage
from billing.prices.cards import parse_card
from cachesvc.cli.explain import _request_lines
from engine.remote import upstreams
from engine.remote.client import HttpAnswer
from tests.api.conftest import refusal, until_engines
from tests.api.driver import Visit
from tests.api.relaying import ALL, bound, charges, paying, quiet, relaying, unreported, usage_of
from tests.support import upstream as upstream_module
from tests.support.billing import card_text, priced
from tests.support.remote_engine import DONE, event
from tests.support.stand_in import RESET, WAIT, Script, served
from tests.support.upstream import (
    CACHED,
    CHAT,
    COMPLETIONS,
    MESSAGES,
    OUTPUT,
    PATHS,
    PROMPT,
    RESPONSES,
    STREAMS,
    WHOLE,
    UpstreamServer,
    body,
    compact,
    joined,
    stream_of,
)
from tiers.remote.breaker import Breaker

pytestmark = pytest.mark.anyio
MISS = 1_000_000  # units, of the launch card


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    """A site that fails is asked again at once, except where that is the subject."""
    monkeypatch.setattr(Breaker, "failed", lambda self: None)


@pytest.fixture
def at(tmp_path):
    """Serves what these endpoints have."""
    return partial(relaying, tmp_path)


def code_at_the_end(path, content):
    """Of the error event that ends a stream."""
    lines = [line for line in content.split(b"\n") if line.startswith(b"data: {")]
    last = orjson.loads(lines[-1][6:])
    if path == RESPONSES:
        return last["code"] if last["type"] == "error" else None
    if path == MESSAGES:
        return last["error"]["code"] if last["type"] == "error" else None
    assert content.endswith(DONE)
    return (last.get("error") or {}).get("code")


# Where the endpoint is killed: what it says before, how many tokens of text the client has, and
# what the answer is.
BEFORE, CUT, WHOLE_ANSWER = "before", "cut", "whole"


def killed_at(path, point, rng):
    head, text, end, usage, _ = STREAMS[path]
    num = rng.randint(1, len(text))
    said = [*head, *text[:num]]
    match point:
        case "before headers":
            return [RESET], 0, BEFORE
        case "after headers":
            return [b"", RESET], 0, BEFORE
        case "before the text":
            return [*head, RESET], 0, CUT if head else BEFORE
        case "between two events":
            return [*said, RESET], num, CUT
        case "in the middle of an event":
            data = text[num - 1]
            return [*said[:-1], data[: rng.randrange(1, len(data) - 1)], RESET], num - 1, CUT
        case "before usage":
            return [*head, *text, *end, RESET], len(text), CUT
        case "after usage":
            return [*head, *text, *end, *usage, 0.2, RESET], len(text), WHOLE_ANSWER
    raise AssertionError(point)


POINTS = (
    *("before headers", "after headers", "before the text", "between two events"),
    *("in the middle of an event", "before usage", "after usage"),
)


@pytest.mark.parametrize("path", PATHS)
async def test_a_killed_endpoint_is_settled_once_wherever_it_was(up, at, path):
    seed = random.randrange(1 << 32)
    rng = random.Random(seed)
    points = [*POINTS, *rng.choices(POINTS, k=5)]
    rng.shuffle(points)
    asked = body(path, stream=True, stream_options={"include_usage": True})
    async with at(up) as (service, client):
        for number, point in enumerate(points):
            up.script[path], num_sent, kind = killed_at(path, point, rng)
            answer = await client.post(path, json=asked)
            why = f"seed {seed}: {point} -> {answer.content!r}"
            num_got = sum(each in answer.content for each in STREAMS[path][1])
            assert num_got <= num_sent, why
            entries = charges(service)
            assert number + 1 == len(entries), why
            usage = usage_of(entries[-1])
            if kind == BEFORE or (kind == CUT and answer.status_code != 200):
                assert 502 == answer.status_code, why
                assert {} == usage and 0 == entries[-1].amount, why
                continue
            if kind == WHOLE_ANSWER:
                assert ALL == usage, why
                sent = [each for each in up.script[path] if isinstance(each, bytes)]
                assert joined(sent) == answer.content, why
                continue
            assert not any(each in answer.content for each in STREAMS[path][3]), why
            if path == CHAT:
                assert STREAMS[path][2][0] not in answer.content, f"{why}: before it was settled"
            told = ALL if path == MESSAGES else unreported(**asked)  # it begins with its prompt
            assert (told | {"output": num_got} if num_got else {}) == usage, why
            if answer.status_code == 200:
                assert "engine_fault" == code_at_the_end(path, answer.content), why


REFUSALS: dict[int, tuple[int, str, str]] = {
    400: (400, "invalid_value", "secret words"),
    404: (502, "engine_fault", "The engine answered 404"),
    401: (502, "engine_fault", "The engine answered 401"),
    413: (413, "request_too_large", "larger than the engine takes"),
    422: (400, "invalid_value", "secret words"),
    429: (429, "engine_overloaded", "is overloaded"),
    500: (502, "engine_fault", "The engine answered 500"),
    503: (503, "engine_unavailable", "cannot serve now"),
    529: (503, "engine_unavailable", "cannot serve now"),
    302: (502, "engine_fault", "The engine answered 302"),
}


async def test_a_refusal_reaches_the_client_in_its_protocol_and_costs_nothing(up, at):
    up.headers = {"retry-after": "7", "location": "http://127.0.0.1:1/"}
    up.refusal = orjson.dumps({"error": {"message": "secret words", "type": "x"}})
    async with at(up) as (service, client):
        for number, (status, (shown, code, words)) in enumerate(REFUSALS.items()):
            up.status = status
            for path in PATHS:
                answer = await client.post(path, json=body(path, stream=number % 2 == 0))
                error = answer.json()["error"]
                assert (shown, code) == (answer.status_code, error["code"]), (path, status)
                assert words in error["message"], (path, status)
                assert ("secret" in answer.text) == ("secret" in words)
                assert (path == MESSAGES) == ("error" == answer.json().get("type"))
                wait = "7" if code.startswith("engine_") else None
                assert wait == answer.headers.get("retry-after")
        assert {0} == {entry.amount for entry in charges(service)}
        assert 4 * len(REFUSALS) == len(charges(service))


FIELD = {"type": "missing", "loc": ["body", "messages"], "msg": "Field required"}
REASONS: dict[bytes, str] = {  # of FastAPI, Mistral, Gemini, a proxy, and one that repeats the body
    orjson.dumps({"detail": [FIELD]}): "body.messages: Field required",
    orjson.dumps({"message": {"detail": [FIELD]}}): "body.messages: Field required",
    orjson.dumps([{"error": {"code": 400, "message": "bad key"}}]): "bad key",
    b"<html>": "it gave no reason",
    orjson.dumps({"error": {"message": "x" * 200_000}}): "it gave no reason",
}


async def test_a_prompt_that_is_too_long_is_told_as_clients_know_it(up, at):
    up.status, said = 400, "This model's maximum context length is 4000 tokens."
    async with at(up) as (service, client):
        for error in ({"message": said}, {"code": "context_length_exceeded"}):
            up.refusal = orjson.dumps({"error": error})
            answer = await client.post(CHAT, json=body(CHAT))
            assert "context_length_exceeded" == answer.json()["error"]["code"]
        for up.refusal, words in REASONS.items():
            answer = await client.post(CHAT, json=body(CHAT))
            assert (400, "invalid_value") == refusal(answer)
            assert answer.json()["error"]["message"].endswith(f": {words}"), words
        assert sites(service)[0].is_up


async def test_another_site_is_tried_once_before_the_first_byte(up, at):
    with served(UpstreamServer()) as other:
        async with at(up, other) as (service, client):
            for stream in (False, True):
                for status in (429, 500, 503):
                    up.status = status
                    other.asked.clear()
                    answer = await client.post(CHAT, json=body(CHAT, stream=stream))
                    assert 200 == answer.status_code, answer.text
                    assert 1 == len(other.asked)
            other.status = 503
            up.asked.clear()
            answer = await client.post(CHAT, json=body(CHAT))
            assert 503 == answer.status_code and 1 == len(up.asked)
            up.status, up.refusal = 400, b"{}"
            other.asked.clear()
            assert 400 == (await client.post(CHAT, json=body(CHAT))).status_code
            assert [] == other.asked, "a body that one refuses is not sent to the next"
            up.status = other.status = 200
            up.script[CHAT] = [*STREAMS[CHAT][0], *STREAMS[CHAT][1], RESET]
            other.asked.clear()
            answer = await client.post(CHAT, json=body(CHAT, stream=True))
            assert "engine_fault" == code_at_the_end(CHAT, answer.content)
            assert [] == other.asked, "nor is a stream that has begun"
            assert 9 == len(charges(service))


async def test_a_site_that_comes_later_is_used_once_it_is_what_the_others_are(
    up, at, monkeypatch, caplog
):
    """Which keep tenants apart by `cache_salt`. One that denies requests is asked again whether it
    is that."""
    monkeypatch.setattr(upstreams, "JOIN_S", 0.02)
    up.cards[0]["owned_by"] = "vllm"
    with served(UpstreamServer()) as other:
        right = {**other.cards[0], "owned_by": "vllm"}
        other.lists = 503
        async with at(other, up) as (_, client):
            await until_engines(client, {other.url: "does not answer"})
            wrong = {
                "has third, not up": {"id": "third"},
                "a context of 99 tokens, not 4000": {"max_model_len": 99},
                "has no cache_salt": {"owned_by": "them"},
                "counts the first prompt": {"owned_by": "llamacpp"},
            }
            for why, change in wrong.items():
                other.cards, other.lists = [right | change], 200
                async with asyncio.timeout(30):
                    while why not in caplog.text:
                        await asyncio.sleep(0.02)
                await until_engines(client, {other.url: "is refused; the log says why"})
                assert 200 == (await client.post(CHAT, json=body(CHAT))).status_code
                assert [] == other.asked
            other.cards = [right]
            await until_engines(client, None)
            up.status = 503
            assert 200 == (await client.post(CHAT, json=body(CHAT))).status_code
            assert 1 == len(other.asked)
            for other.status in (401, 403, 404):  # its tenant may have asked for a wrong path
                up.status, other.num_looks = 200, 0
                assert 200 == (await client.post(CHAT, json=body(CHAT))).status_code
                async with asyncio.timeout(30):
                    while not other.num_looks:
                        await asyncio.sleep(0.02)
                other.lists = 401
                assert 200 == (await client.post(CHAT, json=body(CHAT))).status_code
                await until_engines(client, {other.url: "is refused; the log says why"})
                up.status = 429
                told = refusal(await client.post(CHAT, json=body(CHAT)))
                assert (429, "engine_overloaded") == told, "there is no other to try"
                other.status, other.lists = 200, 200
                await until_engines(client, None)
            assert 1 + 2 * 3 == len(other.asked), "it was used until its list denied it"


NO_ANSWERS: dict[str, bytes] = {
    "no JSON": b"{secret words",
    "no object": b"[1]",
    "an error": b'{"error": {"message": "secret words"}}',
    "an error of vLLM's": b'{"object": "error", "choices": [], "message": "secret words"}',
    "no answer": b'{"detail": "secret words"}',
    "too long": b"{" + b" " * 4096 + b"}",
}
NO_EVENTS: dict[str, bytes] = {
    "no JSON": b"data: {secret words\n\n",
    "no object": b"data: [1]\n\n",
    "an error": event({"error": {"message": "secret words"}}),
    "an error of vLLM's": event({"object": "error", "message": "secret words"}),
    "an error of Anthropic's": b'event: error\ndata: {"type": "error", "error": {}}\n\n',
    "a failed response": event({"type": "response.failed", "response": {"error": "secret"}}),
    "too long": b"data: " + b"x" * 4096,
}


async def test_what_is_no_answer_is_an_error_without_its_words(up, at, monkeypatch):
    monkeypatch.setattr(passage, "MAX_ANSWER_BYTES", 2048)
    monkeypatch.setattr(passage, "MAX_EVENT_BYTES", 2048)
    async with at(up) as (service, client):
        for case, said in NO_ANSWERS.items():
            up.whole[CHAT] = said
            answer = await client.post(CHAT, json=body(CHAT))
            assert (502, "engine_fault") == refusal(answer), case
        for case, said in NO_EVENTS.items():
            for begun in ([], STREAMS[CHAT][0] + STREAMS[CHAT][1][:1]):
                up.script[CHAT] = [*begun, said, *STREAMS[CHAT][4]]
                answer = await client.post(CHAT, json=body(CHAT, stream=True))
                assert "secret" not in answer.text, case
                if begun and answer.status_code == 200:
                    assert "engine_fault" == code_at_the_end(CHAT, answer.content), case
                else:
                    assert (502, "engine_fault") == refusal(answer), case
        up.headers = {"content-type": "text/event-stream"}
        up.whole[CHAT] = joined(stream_of(CHAT))
        assert (502, "engine_fault") == refusal(await client.post(CHAT, json=body(CHAT)))
        assert all(usage_of(entry).get("output", 0) <= 1 for entry in charges(service))


async def test_a_stream_that_ends_before_it_begins_is_none_and_costs_nothing(up, at):
    async with at(up) as (service, client):
        for said in ([], [event({"detail": "x"})], STREAMS[CHAT][0]):
            up.script[CHAT] = [*said, DONE]
            answer = await client.post(CHAT, json=body(CHAT, stream=True))
            assert "engine_fault" in answer.text
            assert {} == usage_of(charges(service)[-1])


async def test_what_is_cut_off_after_an_answer_and_its_usage_is_missed_by_nobody(up, at):
    async with at(up) as (service, client):
        for path in (CHAT, COMPLETIONS, MESSAGES):
            *events, done = stream_of(path)
            up.script[path] = [*events, done[:-5]]
            asked = body(path, stream=True, stream_options={"include_usage": True})
            answer = await client.post(path, json=asked)
            assert joined(events) == answer.content
            assert ALL == usage_of(charges(service)[-1])


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_in_an_encoding_that_nobody_asked_for_is_none(up, tmp_path, stream):
    """Its bytes would pass as a comment of a stream."""
    up.headers = {"content-encoding": "gzip"}
    async with relaying(tmp_path, up) as (service, client):
        answer = await client.post(CHAT, json=body(CHAT, stream=stream))
        assert (502, "engine_fault") == refusal(answer)
        up.headers = {"content-encoding": "Identity", "content-type": "Text/Event-Stream"}
        if stream:
            answer = await client.post(CHAT, json=body(CHAT, stream=True))
            assert 200 == answer.status_code, answer.text
            assert [{}, ALL] == [usage_of(each) for each in charges(service)]


async def test_a_body_that_ends_where_its_header_says_is_read_to_there(
    up, tmp_path, monkeypatch, caplog
):
    """From a server of HTTP/1.0 as well. Nothing of its text is logged."""
    for version in ("HTTP/1.0", "HTTP/1.1"):
        monkeypatch.setattr(upstream_module._Handler, "protocol_version", version)
        up.headers = {}
        async with relaying(tmp_path / version[-1], up) as (service, client):
            assert 200 == (await client.post(CHAT, json=body(CHAT))).status_code
            up.headers = {"content-length": "150"}
            answer = await client.post(CHAT, json=body(CHAT))
            assert (502, "engine_fault") == refusal(answer)
            assert [ALL, {}] == [usage_of(each) for each in charges(service)]
            assert "Hi!" not in caplog.text


@pytest.mark.parametrize("price", ["3", "refused"])
async def test_an_answer_without_a_count_costs_what_the_card_says_or_is_an_error(
    up, at, monkeypatch, price
):
    """And then the endpoint is left alone, as one that fails. Who leaves pays all the same."""
    monkeypatch.undo()  # with its breaker
    head, text, end, _, done = STREAMS[CHAT]
    up.script[CHAT] = [*head, *text, *end, *done]
    up.whole[CHAT] = compact({**WHOLE[CHAT], "usage": None})
    asked = [body(CHAT), body(CHAT, stream=True)]
    is_sold = price != "refused"
    async with at(up) as (service, client):
        card = card_text("told", priced("*", "0.1", "1", "2", unreported=price))
        service._money.accounts.apply_card(parse_card(card), by="test")
        whole, streamed = [await client.post(CHAT, json=each) for each in asked]
        assert is_sold == (whole.status_code == 200), whole.text
        assert joined([*head, *text]) in streamed.content
        assert is_sold == (streamed.content == joined(up.script[CHAT]))
        sold = [unreported(**each) | {"output": OUTPUT} for each in asked]
        assert (sold if is_sold else [{}, {}]) == [usage_of(each) for each in charges(service)]
        costs = [3 * MISS * each["miss"] + 2 * MISS * OUTPUT for each in sold]
        assert (costs if is_sold else [0, 0]) == [-each.amount for each in charges(service)]
        metrics = (await client.get("/metrics")).text
        counted = sum(bound(**each) for each in asked)
        assert f'cachesvc_miss_tokens_total{{reason="unreported"}} {counted}.0' in metrics
        up.script[CHAT] = [*head, *text[:2], WAIT]
        visit = Visit(client._transport.app, CHAT, asked[1], host="localhost").start()
        await visit.leave_when(lambda: '"i"' in visit.text)
        up.go.set()
        assert sold[1] | {"output": 2} == usage_of(charges(service)[2])
        if not is_sold:
            assert "engine_fault" == whole.json()["error"]["code"]
            assert "failed" == charges(service)[0].details["outcome"]
            assert "engine_fault" == code_at_the_end(CHAT, streamed.content)
            assert not any(each in streamed.content for each in end)
            shown = await client.get(f"/v1/cache/requests/{whole.headers['x-request-id']}")
            assert "did not say" in shown.text
            failed, why, *_ = _request_lines(shown.json())
            assert ": failed, " in failed and whole.json()["error"]["message"] == why.strip()
            await client.post(CHAT, json=asked[0])
            assert (3, False) == (sites(service)[0].errors, sites(service)[0].is_up)


HALF = b'{"choices": [{"index": 0, "message": {"content": "H'
# What the endpoint has sent, of a stream and of an answer that comes whole, when the client leaves.
MOMENTS: dict[str, tuple[Script, Script]] = {
    "the body is sent": ([WAIT], [WAIT]),
    "the headers came": ([b": hi\n\n", WAIT], [b" ", WAIT]),
    "the first event came": ([*STREAMS[CHAT][0], WAIT], [b"{", WAIT]),
    "in the middle": ([*STREAMS[CHAT][0], *STREAMS[CHAT][1][:2], WAIT], [HALF, WAIT]),
}


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_ends_the_work_and_pays_the_prompt_once_it_is_sent(
    up, at, stream
):
    """The endpoint may have computed it, and it bills the account for that."""
    asked = body(CHAT, stream=stream)
    async with at(up) as (service, client):
        for number, (moment, scripts) in enumerate(MOMENTS.items()):
            script = [*scripts[not stream], *STREAMS[CHAT][1] * 5000]
            up.script[CHAT] = up.whole[CHAT] = script
            up.go.clear()
            up.left.clear()
            said = joined(each for each in scripts[0] if isinstance(each, bytes) and stream)
            visit = Visit(client._transport.app, CHAT, asked, host="localhost").start()
            await visit.leave_when(partial(_has_said, up, number, visit, said.decode()))
            up.go.set()
            assert await asyncio.to_thread(up.left.wait, 30), f"{moment}: it was closed"
            await quiet(service)
            entry = charges(service)[number]
            assert "client_gone" == entry.details["outcome"], moment
            sent = {"output": 2} if stream and moment == "in the middle" else {}
            assert unreported(**asked) | sent == usage_of(entry), moment
        metrics = (await client.get("/metrics")).text
        counted = len(MOMENTS) * bound(**asked)
        assert f'cachesvc_miss_tokens_total{{reason="unreported"}} {counted}.0' in metrics


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("status", [400, 404, 429, 500])
async def test_a_client_that_leaves_while_its_refusal_is_read_pays_nothing(
    up, at, monkeypatch, stream, status
):
    """The endpoint has computed nothing, whatever it would have said. Its connection is closed."""
    reading, beginning = asyncio.Event(), HttpAnswer.beginning

    async def read(answer):
        reading.set()
        return await beginning(answer)

    async with at(up) as (service, client):
        monkeypatch.setattr(HttpAnswer, "beginning", read)
        up.status, up.refusal = status, [b'{"error": ', WAIT, *[b" "] * 50_000]
        app = client._transport.app
        visit = Visit(app, CHAT, body(CHAT, stream=stream), host="localhost").start()
        await visit.leave_when(reading.is_set)
        up.go.set()
        assert await asyncio.to_thread(up.left.wait, 30), "it was closed"
        await quiet(service)
        (entry,) = charges(service)
        assert ({}, 0) == (usage_of(entry), entry.amount)
        assert "client_gone" == entry.details["outcome"]
        assert 0 == sites(service)[0].num_in_flight
        assert 1 == len(up.asked), "nobody is there to ask again for"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_before_its_body_is_sent_pays_nothing(up, at, stream):
    """Nobody takes it: neither the connection nor the bytes."""
    async with at(up) as (service, client):
        up.shutdown()
        up.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        large = body(CHAT, stream=stream, padding="x" * 4_000_000)
        taking = asyncio.create_task(asyncio.to_thread(_some_of_it, up))
        app = client._transport.app
        await Visit(app, CHAT, large, host="localhost").start().leave_when(taking.done)
        with contextlib.ExitStack() as stack:
            stack.enter_context(await taking)
            for _ in range(2 * up.request_queue_size):
                filler = stack.enter_context(socket.socket())
                filler.setblocking(False)
                filler.connect_ex(up.server_address)
            visit = Visit(app, CHAT, body(CHAT, stream=stream), host="localhost").start()
            await visit.leave_when(lambda: sites(service)[0].num_in_flight == 1)
        assert [({}, 0)] * 2 == [(usage_of(entry), entry.amount) for entry in charges(service)]


def sites(service):
    return service.core.engine.stats().engines


def _has_said(up, num_before, visit, said):
    return len(up.asked) > num_before and said in visit.text


def _some_of_it(up):
    connection, _ = up.socket.accept()
    assert connection.recv(1 << 16)
    return connection


ALIVE = [*[b": here\n\n", event({"id": "c-1", "choices": []}), 0.02] * 5000]
FOR_EVER: dict[str, tuple[Script, Script, dict[str, int]]] = {
    "before the text": (ALIVE, [b" ", 0.02] * 5000, {}),
    "in the middle": ([*STREAMS[CHAT][1][:2], *ALIVE], [HALF, *[b" ", 0.02] * 5000], {"output": 2}),
}


@pytest.mark.parametrize("case", FOR_EVER)
async def test_an_endpoint_that_never_ends_is_given_up_after_a_while(up, at, case):
    """It is not silent: comments, events of nothing and spaces come for ever."""
    up.script[CHAT], up.whole[CHAT], sent = FOR_EVER[case]
    asked = body(CHAT, stream=True)
    async with at(up, engine_max_time=1) as (service, client):
        whole = await client.post(CHAT, json=body(CHAT))
        assert (504, "engine_timeout") == refusal(whole)
        streamed = await client.post(CHAT, json=asked)
        assert "engine_timeout" == code_at_the_end(CHAT, streamed.content)
        expected = unreported(**asked) | sent if sent else {}
        assert [{}, expected] == [usage_of(entry) for entry in charges(service)]
        assert await asyncio.to_thread(up.left.wait, 30) and not sites(service)[0].num_in_flight


async def test_the_server_stops_while_a_stream_passes(up, at):
    head, text, *_ = STREAMS[CHAT]
    up.script[CHAT] = [*head, *text[:1], WAIT]
    async with at(up) as (service, client):
        app = client._transport.app  # type: ignore[attr-defined]
        visit = Visit(app, CHAT, body(CHAT, stream=True), host="localhost").start()
        await visit.first_text()
        visit.task.cancel()
        await visit.task
        up.go.set()
        assert "generation_failed" in visit.text and visit.text.endswith(DONE.decode())
        (entry,) = charges(service)
        assert "failed" == entry.details["outcome"]


@pytest.mark.parametrize("path", [CHAT, MESSAGES])
async def test_a_stream_ends_when_its_balance_is_used_up(up, at, path):
    """What is held for 256 tokens of output and a part of the next slice is all there is."""
    head, text, *rest = STREAMS[path]
    up.script[path] = [*head, *text * 400, *(each for part in rest for each in part)]
    asked = body(path, stream=True, max_tokens=2000)
    units = bound(**asked) * MISS + 300 * 2 * MISS
    async with at(up) as (service, client):
        answer = await client.post(path, json=asked, headers=paying(service, units))
        assert "insufficient_balance" == code_at_the_end(path, answer.content)
        (entry,) = charges(service, "acme")
        assert "budget" == entry.details["outcome"]
        assert 200 <= usage_of(entry)["output"] <= 256
        assert 0 <= service._money.accounts.tenant("acme").balance


async def test_an_answer_that_comes_whole_is_held_whole(up, at):
    """Nobody can end it when its balance is used up."""
    async with at(up) as (service, client):
        asked = body(CHAT, max_tokens=2000)
        headers = paying(service, bound(**asked) * MISS + 300 * 2 * MISS)
        refused = await client.post(CHAT, json=asked, headers=headers)
        assert (402, "insufficient_balance") == refusal(refused)
        assert [] == up.asked
        answer = await client.post(CHAT, json=asked | {"max_tokens": 300}, headers=headers)
        assert 200 == answer.status_code, answer.text


async def test_thoughts_that_nobody_sees_are_held_before_they_are_charged(up, at):
    told = {"prompt_tokens": PROMPT, "prompt_tokens_details": {"cached_tokens": CACHED}}
    usage = event({"choices": [], "usage": {**told, "completion_tokens": 1500}})
    head, text, end, _, done = STREAMS[CHAT]
    up.script[CHAT] = [*head, *text, *end, usage, *done]
    asked = body(CHAT, stream=True, max_tokens=2000)
    async with at(up) as (service, client):
        answer = await client.post(CHAT, json=asked)
        assert joined([*head, *text, *end, *done]) == answer.content
        assert 1500 == usage_of(charges(service)[0])["output"]
        headers = paying(service, bound(**asked) * MISS + 300 * 2 * MISS)
        await client.post(CHAT, json=asked, headers=headers)
        (entry,) = charges(service, "acme")
        assert 256 == usage_of(entry)["output"], "what was held"
        assert 0 <= service._money.accounts.tenant("acme").balance


# A limit that another protocol has, or only some endpoints: no other is to be believed.
LIMITS = {
    CHAT: ["max_output_tokens", "max_tokens"],
    COMPLETIONS: ["max_completion_tokens", "max_tokens"],
    MESSAGES: ["max_tokens"],
    RESPONSES: ["max_tokens", "max_output_tokens"],
}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [False, True])
async def test_output_above_a_limit_that_the_endpoint_does_not_know_is_charged(
    up, at, path, stream
):
    """What the balance covers of it. Nothing is held below what the protocol's own fields say."""
    async with at(up) as (service, client):
        for number, limit in enumerate(LIMITS[path]):
            bare = {name: n for name, n in body(path).items() if not name.startswith("max_")}
            asked = bare | {"stream": stream, limit: 1}
            answer = await client.post(path, json=asked)
            assert 200 == answer.status_code, answer.text
            assert ALL == usage_of(charges(service)[number]), limit
        own, held = LIMITS[path][-1], bound(**asked) * MISS + 2 * MISS
        for name, more, output in (("poor", 0, 1), ("rich", 4 * MISS, OUTPUT)):
            headers = paying(service, held + more, name)
            answer = await client.post(path, json=asked, headers=headers)
            assert 200 == answer.status_code, answer.text
            (entry,) = charges(service, name)
            assert ALL | {"output": output} == usage_of(entry), name
        for limit in LIMITS[path][:-1]:
            answer = await client.post(path, json=asked | {limit: 1, own: None}, headers=headers)
            assert 402 == answer.status_code, "it is held as without a limit"


async def test_a_retry_with_its_key_gets_the_first_answer_and_pays_once(up, at):
    async with at(up) as (service, client):
        for number, path in enumerate(PATHS):
            for stream in (False, True):
                key = {"idempotency-key": f"{number}-{stream}"}
                asked = body(path, stream=stream)
                first = await client.post(path, json=asked, headers=key)
                up.status = 500
                again = await client.post(path, json=asked, headers=key)
                up.status = 200
                assert (200, first.content) == (again.status_code, again.content)
        assert 8 == len(charges(service))
