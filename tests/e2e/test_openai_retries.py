"""The official openai client, whose connections break: its silent retries are paid once.

A proxy stands between the client and a server on a real ledger. It drops a connection while the
answer is made, swallows a whole answer, or lets it through.
"""

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import openai
import pytest
import uvicorn

from api.app import create_app
from billing.gate.entries import Kind
from billing.money import UNITS
from billing.proof import audit
from tests.api.bank import HELLO, MISS, OUTPUT, PROMPT_TOKENS, Bank
from tests.support.wire import Script

ANSWER = "z" * 40
PRICE = PROMPT_TOKENS * MISS + (len(ANSWER) + 1) * OUTPUT
DROP_S = 0.08  # the answer takes longer


@dataclass
class Proxy:
    """What becomes of each connection in turn: "drop", "swallow", or, when none is left, passed."""

    upstream: int
    fates: list[str] = field(default_factory=list)
    port: int = 0
    num_connections: int = 0

    async def serve(self, ready: threading.Event, over: asyncio.Event) -> None:
        server = await asyncio.start_server(self._meet, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        ready.set()
        async with server:
            await over.wait()

    async def _meet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        fate = self.fates.pop(0) if self.fates else "pass"
        inner_reader, inner_writer = await asyncio.open_connection("127.0.0.1", self.upstream)
        forth = asyncio.create_task(_carry(reader, inner_writer))
        try:
            if fate == "drop":
                await asyncio.sleep(DROP_S)
            elif fate == "swallow":
                await inner_reader.read(1)
                await asyncio.sleep(0.1)  # the rest has been sent as well
            else:
                await _carry(inner_reader, writer)
        finally:
            forth.cancel()
            for each in (inner_writer, writer):
                each.transport.abort()


async def _carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while piece := await reader.read(65536):
            writer.write(piece)
            await writer.drain()


@dataclass(frozen=True)
class House:
    bank: Bank
    proxy: Proxy
    client: openai.OpenAI

    def ask(self, *fates: str, **options: object) -> str:
        """One request whose connections end as `fates` say; its answer."""
        self.proxy.fates[:] = fates
        answer = self.client.chat.completions.create(
            model="bytes", messages=HELLO["messages"], **options
        )
        content: str = answer.choices[0].message.content
        return content

    def spent(self) -> int:
        """What the customer has paid once nothing runs any more."""
        deadline = time.monotonic() + 5
        while self.bank.accounts.tenant("acme").held and time.monotonic() < deadline:
            time.sleep(0.01)
        return self.bank.spent(UNITS)

    def booked(self, *kinds: Kind) -> bool:
        """Whether these entries stand, once a connection that was cut has been settled too."""
        deadline = time.monotonic() + 5
        while self._kinds() != list(kinds) and time.monotonic() < deadline:
            time.sleep(0.01)
        return self._kinds() == list(kinds)

    def _kinds(self) -> list[Kind]:
        return [entry.kind for entry in self.bank.entries if entry.kind is not Kind.TOPUP]


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    bank = Bank(tmp_path)
    bank.house.engine.script = Script(answer=ANSWER, step_s=0.004)
    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(create_app(bank.house.wire), log_config=None, http="httptools")
    http = uvicorn.Server(config)
    proxy = Proxy(listener.getsockname()[1])
    ready, over = threading.Event(), asyncio.Event()
    loops: list[asyncio.AbstractEventLoop] = []

    async def both() -> None:
        loops.append(asyncio.get_running_loop())
        async with asyncio.TaskGroup() as group:
            group.create_task(http.serve(sockets=[listener]))
            group.create_task(proxy.serve(ready, over))

    thread = threading.Thread(target=lambda: asyncio.run(both()))
    thread.start()
    assert ready.wait(10)
    key = bank.customer(UNITS)["authorization"].removeprefix("Bearer ")
    url = f"http://127.0.0.1:{proxy.port}/v1"
    try:
        with openai.OpenAI(base_url=url, api_key=key, max_retries=3) as client:
            yield House(bank, proxy, client)
    finally:
        http.should_exit = True
        loops[0].call_soon_threadsafe(over.set)
        thread.join(10)
        listener.close()
        bank.house.close()
        bank.ledger.close()
        assert audit.verify(bank.store).problems == []
        bank.store.close()


def test_an_answer_that_never_came_is_not_paid_when_its_retry_comes(house: House) -> None:
    assert ANSWER == house.ask("drop", "drop")
    assert 3 == house.proxy.num_connections
    charge, correction = Kind.CHARGE, Kind.CORRECTION
    assert house.booked(charge, charge, charge, correction, correction)
    assert PRICE == house.spent()


def test_a_retry_of_a_request_with_a_key_is_paid_once(house: House) -> None:
    headers = {"Idempotency-Key": "order-1"}
    assert ANSWER == house.ask("drop", extra_headers=headers)
    assert PRICE == house.spent()
    assert ANSWER == house.ask(extra_headers=headers)
    assert PRICE == house.spent()


def test_a_whole_answer_that_the_network_swallowed_is_there_for_its_key(house: House) -> None:
    assert ANSWER == house.ask("swallow", extra_headers={"Idempotency-Key": "order-1"})
    assert PRICE == house.spent()
    assert house.booked(Kind.CHARGE)
    assert 1 == len(house.bank.house.engine.requests), "it was computed again"


def test_a_key_with_another_body_is_refused_at_once(house: House) -> None:
    """Clients would retry a 409, as if a lock could go away."""
    headers, sent = {"Idempotency-Key": "order-1"}, []
    house.ask(extra_headers=headers)
    with httpx.Client(event_hooks={"request": [sent.append]}) as counted:
        client = house.client.with_options(http_client=counted)
        with pytest.raises(openai.ConflictError, match="another body"):
            client.chat.completions.create(
                model="bytes", messages=HELLO["messages"], seed=1, extra_headers=headers
            )
    assert 1 == len(sent)


def test_without_a_key_what_was_sent_counts_as_delivered(house: House) -> None:
    """The server cannot know better, and must not take a client's word for it."""
    assert ANSWER == house.ask("swallow")
    assert 2 * PRICE == house.spent()


def test_two_requests_alike_are_two_requests(house: House) -> None:
    assert ANSWER == house.ask()
    assert ANSWER == house.ask()
    assert 2 * PRICE == house.spent()
