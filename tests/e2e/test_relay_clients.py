"""The official clients through a server that passes their requests to another server of ours.

All of it speaks real HTTP on 127.0.0.1. What the outer server charges is what the inner one did.
"""

import contextlib
import itertools
import json
import socket
import time
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import anthropic
import openai
import pytest

from api.collaborators import WireSettings
from billing.usage import Usage
from tests.api.real_service import real_service
from tests.api.relaying import charges
from tests.patience import PATIENCE_S
from tests.running_server import listening
from tests.support.remote_engine import event
from tests.support.stand_in import served as upstream_served
from tests.support.upstream import CHAT, UpstreamServer
from tests.support.upstream import body as upstream_body
from tests.support.wire import Script

SAID: list[Any] = [{"role": "user", "content": "hi"}]


@pytest.fixture(params=["openai+", ""], ids=["named", "found by asking"])
def relay(server, tmp_path, request):
    """A server before `server`, which the second time finds by itself that no tokens are taken."""
    inner = request.param + server.url.removesuffix("/v1")
    made = real_service(tmp_path, Path("bytes"), engine_backend=inner)
    with made as (service, app, _), listening(app) as url:
        yield service, url


def charged(service):
    return [Usage.from_record(each.details.get("usage", {})) for each in charges(service)]


def served(server):
    found = [charge.served for charge in server.house.meter.charges]
    return [each.usage for each in found if each is not None]


def test_openais_client(server, relay):
    service, url = relay
    server.house.engine.script = Script(answer="one two", hits={"hit_disk": 8, "hit_host": 3})
    with openai.OpenAI(base_url=f"{url}/v1", api_key="sk-any", max_retries=0) as client:
        assert ["bytes"] == [model.id for model in client.models.list()]
        asked = {"model": "bytes", "messages": SAID}
        answer = client.chat.completions.create(**asked)
        assert "one two" == answer.choices[0].message.content
        chunks = list(client.chat.completions.create(**asked, stream=True))
        assert "one two" == "".join(c.choices[0].delta.content or "" for c in chunks)
        assert not any(chunk.usage for chunk in chunks), "it was not asked for"
        with client.chat.completions.stream(**asked) as helped:
            assert "one two" == helped.get_final_completion().choices[0].message.content
        texts = client.completions.create(model="bytes", prompt=["x" * 20, "y" * 30], max_tokens=7)
        assert ["one two"] * 2 == [choice.text for choice in texts.choices]
        response = client.responses.create(model="bytes", input="hi")
        assert "one two" == response.output_text
        with client.responses.stream(model="bytes", input="hi") as stream:
            assert "one two" == stream.get_final_response().output_text
        with pytest.raises(openai.BadRequestError, match="tempe"):
            client.chat.completions.create(**asked, temperature=3)
    assert served(server) == charged(service)[:6], "by tier, as one of ours tells"
    assert 6 == len(served(server)) and (8, 3) == (served(server)[0].hit_disk, 3)


def test_anthropics_client(server, relay):
    service, url = relay
    server.house.engine.script = Script(answer="one two", hits={"hit_host": 3})
    with anthropic.Anthropic(base_url=url, api_key="sk-any", max_retries=0) as client:
        asked = {"model": "bytes", "max_tokens": 50, "messages": SAID}
        message = client.messages.create(**asked)
        assert ("one two", 3) == (message.content[0].text, message.usage.cache_read_input_tokens)
        with client.messages.stream(**asked) as stream:
            assert message.usage.input_tokens == stream.get_final_message().usage.input_tokens
        with pytest.raises(anthropic.BadRequestError, match="tempe"):
            client.messages.create(**asked, extra_body={"temperature": 3})
    assert served(server) == charged(service)[:2]


def test_a_failure_of_the_inner_server_is_raised_by_the_client(server, relay):
    service, url = relay
    server.house.engine.script = Script(answer="one two three", fail_after=4)
    with openai.OpenAI(base_url=f"{url}/v1", api_key="sk-any", max_retries=0) as client:
        with pytest.raises(openai.APIError, match="engine"):
            list(client.chat.completions.create(model="bytes", messages=SAID, stream=True))
        with pytest.raises(openai.InternalServerError, match="engine"):
            client.chat.completions.create(model="bytes", messages=SAID)
    with (
        anthropic.Anthropic(base_url=url, api_key="sk-any", max_retries=0) as client,
        pytest.raises(anthropic.APIStatusError, match="engine"),
        client.messages.stream(model="bytes", max_tokens=50, messages=SAID) as stream,
    ):
        stream.get_final_message()
    assert 0 == service._money.accounts.tenant("default").held


def test_a_client_that_reads_nothing_holds_little_and_pays_what_it_was_sent(tmp_path, monkeypatch):
    """The endpoint has to wait too, until the client is disconnected."""
    hasty = partial(WireSettings, write_timeout_s=1.0)
    monkeypatch.setattr("cachesvc.service.WireSettings", hasty)
    choice = {"index": 0, "delta": {"content": "x" * 16_000}}
    taken = itertools.count()

    def events():
        while next(taken) < 20_000:
            yield event({"choices": [choice]})

    with contextlib.ExitStack() as stack:
        up = stack.enter_context(upstream_served(UpstreamServer()))
        up.script[CHAT] = events()  # type: ignore[assignment]
        made = real_service(tmp_path, Path("up"), engine_backend=f"openai+{up.url}")
        service, app, _ = stack.enter_context(made)
        url = urlsplit(stack.enter_context(listening(app)))
        client = stack.enter_context(socket.socket())
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        client.connect((url.hostname, url.port))
        asked = json.dumps(upstream_body(CHAT, stream=True, max_tokens=4000)).encode()
        head = f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(asked)}\r\n\r\n"
        client.sendall(head.encode() + asked)
        assert up.left.wait(PATIENCE_S), "the endpoint's connection was closed"
        num_taken = next(taken)
        give_up = time.monotonic() + PATIENCE_S
        while not (paid := charged(service)) and time.monotonic() < give_up:
            time.sleep(0.01)
        said = b"".join(iter(lambda: client.recv(1 << 20), b""))
        num_read = said.count(b"}}]}\n")
        assert num_taken < 4000 and num_read <= paid[0].output < num_read + 100
