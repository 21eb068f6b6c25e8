"""Delivery of one answer, as server-sent events or as one JSON body.

    generation ─► wire format ─► client
        │                          │ gone, or reads nothing for write_timeout_s
        └──────── abort ◄──────────┘

A delivery runs in its own task. Whatever happens to the connection, the task continues to the
engine's last output and the settlement. The end of an answer (the last finish_reason, the usage,
`[DONE]`, the JSON body) is sent after the settlement is durable. An error before the first byte is
an answer with its own status; after it, an event.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import orjson
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from api.errors import (
    ApiError,
    ErrorAnswer,
    GenerationFailed,
    InvalidRequest,
    answer_to,
    log_untold,
)
from api.headers import EVENT_STREAM
from api.job import Asked, Bill, Delivered, Delta, Job, Served
from api.requests.metering import LedgerCharge
from api.requests.publishing import PUBLISHED, Publish
from api.shapes.answer import WireFormat
from billing.gate.outcomes import Outcome
from billing.usage import EMPTY, Usage
from engine.errors import RemoteFault
from engine.request import FinishReason

KEEPALIVE = b": keep-alive\n\n"
UNCOUNTED = "The engine did not say what this request used."


class Producer(Protocol):
    """What makes an answer: a `Generation`, or a passage through an engine elsewhere."""

    @property
    def job(self) -> Job: ...

    @property
    def answered(self) -> bool:
        """What comes from now on is the end, which waits for the settlement."""
        ...

    def submit(self) -> None: ...

    def deltas(self, idle_s: float | None = None) -> AsyncIterator[list[Delta]]:
        """What is new as it comes, up to the end, and an empty list after `idle_s` of silence."""
        ...

    def usage(self) -> Usage:
        """What has been served so far."""
        ...

    def served(self) -> Served: ...

    def cancel(self) -> None:
        """The client disconnected."""
        ...

    def fail(self, reason: str) -> None: ...

    def close(self) -> None: ...


@dataclass(slots=True, kw_only=True)
class Delivery:
    """The delivery of one answer. `ended` is called once, after settlement and the last byte."""

    generation: Producer
    charge: LedgerCharge
    wire: WireFormat
    stream: bool
    asked: Asked
    headers: Mapping[str, str]
    write_timeout_s: float
    keepalive_s: float
    ended: Callable[[Delivered], Awaitable[None]]
    keep: Callable[[bytes], Awaitable[None]] | None = None  # stores the whole answer, for replays
    publish: Publish | None = None  # sends the prompt's blocks before the answer ends
    _kept: list[bytes] = field(default_factory=list)
    _gone: bool = False
    _started: bool = False
    _status: int = 200
    _first_byte_ns: int = 0

    def _lost(self, outcome: Outcome) -> bool:
        """No byte of the answer has reached the client, and none will: it disconnected, and it sent
        no Idempotency-Key to ask again with."""
        is_kept = self.keep is not None and outcome in (Outcome.FINISHED, Outcome.BUDGET)
        gone = self._gone and not is_kept
        return not self._first_byte_ns and (gone or outcome is Outcome.FAILED)

    def client_gone(self) -> None:
        self._gone = True
        self.generation.cancel()

    async def run(self, send: Send) -> None:
        """Delivers, settles and reports; returns when all of the request is released."""
        held, bill, error = list[Delta](), None, None
        try:
            held = await self._send_stream(send) if self.stream else await self._gather()
        except Exception as failure:  # noqa: BLE001  the top of this task: told, settled, logged
            error = failure
            self.generation.fail("the server failed while it read the answer")
        served = self._sold(self.generation.served())
        try:
            delivered = not self._lost(served.outcome)
            bill = await self.charge.settle(served, delivered=delivered)
            if error is None and served.outcome is Outcome.FAILED:
                error = _failure_of(served)
            if error is None:
                await self._end(send, held, served, bill)
                if delivered and self._lost(served.outcome):  # it disconnected during settlement
                    await self.charge.lost(served)
        except Exception as failure:  # noqa: BLE001  the ledger did not take it, or a bug
            error = error or failure
        if error is not None:
            log_untold(self.generation.job.request_id, error)
            await self._send_error(send, answer_to(error))
        await self._report(served, bill, error)

    def _sold(self, served: Served) -> Served:
        """Nothing, of an answer whose engine did not say what it used, if the card wants that. A
        client that leaves or runs out of money cannot cause this."""
        ended = served.outcome in (Outcome.FINISHED, Outcome.FAILED)
        if not (ended and self.charge.refuses(served.usage)):
            return served
        fault, why = served.fault or RemoteFault(UNCOUNTED), served.error or UNCOUNTED
        return replace(served, usage=EMPTY, outcome=Outcome.FAILED, error=why, fault=fault)

    async def _report(self, served: Served, bill: Bill | None, error: Exception | None) -> None:
        complete = error is None and not self._gone
        await self.ended(
            Delivered(
                status=self._status,
                served=served,
                bill=bill,
                complete=complete,
                error=error,
                first_byte_ns=self._first_byte_ns,
            )
        )

    async def _send_stream(self, send: Send) -> list[Delta]:
        """Sends text as it comes; returns the end, which must wait for the settlement.

        A delta is written when it is sent, because events are numbered in the order of the wire.
        """
        held: list[Delta] = []
        async for deltas in self.generation.deltas(self.keepalive_s):
            held += deltas
            if not self.generation.answered:
                await self._send_events(send, held)
                held = []
            elif not deltas:
                await self._send_events(send, [])
        return held

    def _chunks(self, deltas: Sequence[Delta]) -> bytes:
        return b"".join(map(self.wire.chunk, deltas))

    async def _gather(self) -> list[Delta]:
        async for deltas in self.generation.deltas(self.keepalive_s):
            for delta in deltas:
                self.wire.absorb(delta)
        return []

    async def _end(self, send: Send, held: Sequence[Delta], served: Served, bill: Bill) -> None:
        """Sends the end of the answer. An answer that fails before its first byte is free."""
        try:
            await self._send_end(send, held, served, bill)
        except Exception:
            if not self._first_byte_ns:
                await self.charge.give_back()
            raise

    async def _send_end(
        self, send: Send, held: Sequence[Delta], served: Served, bill: Bill
    ) -> None:
        if self.publish is not None and not self._gone:
            num_tokens = await self.publish(self.generation.job)
            self.headers = {**self.headers, PUBLISHED: str(num_tokens)}
        if not self.stream:
            body = orjson.dumps(self.wire.body(served, bill, self.asked))
            await self._keep(served, body)
            await self._send_whole(send, 200, body, self.headers)
            return
        opening = b"" if self._started else self.wire.opening(served.usage)
        events = opening + self._chunks(held) + self.wire.closing(served, bill, self.asked)
        await self._keep(served, b"".join(self._kept) + events)
        await self._write(send, *self._begin_events(), _part(events, more=False))

    async def _keep(self, served: Served, answer: bytes) -> None:
        if self.keep is not None and served.outcome is not Outcome.CLIENT_GONE:
            await self.keep(answer)

    async def _send_error(self, send: Send, answer: ErrorAnswer) -> None:
        if self._started:
            await self._write(send, _part(self.wire.error(answer), more=False))
        else:
            headers = {**self.headers, **answer.headers}
            body = orjson.dumps(self.wire.refusal(answer))
            await self._send_whole(send, answer.status, body, headers)

    async def _send_events(self, send: Send, deltas: Sequence[Delta]) -> None:
        opening = b"" if self._started else self.wire.opening(self.generation.usage())
        if events := opening + (self._chunks(deltas) if deltas else KEEPALIVE):
            await self._write(send, *self._begin_events(), _part(events, more=True))

    def _begin_events(self) -> list[dict[str, Any]]:
        """The start of the answer; nothing if it has started."""
        if self._started:
            return []
        self._started = True
        headers = {**self.headers, "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        return [_start(200, EVENT_STREAM, headers)]

    async def _send_whole(
        self, send: Send, status: int, body: bytes, headers: Mapping[str, str]
    ) -> None:
        self._started, self._status = True, status
        headers = {**headers, "Content-Length": str(len(body))}
        start = _start(status, "application/json", headers)
        await self._write(send, start, _part(body, more=False))

    async def _write(self, send: Send, *messages: dict[str, Any]) -> None:
        """Sends messages, unless the client disconnects or stops reading."""
        if self.keep is not None:
            self._kept += [message["body"] for message in messages if "body" in message]
        if self._gone:
            return
        self._first_byte_ns = self._first_byte_ns or time.monotonic_ns()
        try:
            async with asyncio.timeout(self.write_timeout_s):
                for message in messages:
                    await send(message)
        except OSError:  # a broken connection, or TimeoutError, which is an OSError
            self.client_gone()


class DeliveryResponse(Response):
    """The response whose body a `Delivery` writes, while it watches for a disconnect."""

    def __init__(self, delivery: Delivery, tasks: set[asyncio.Task[None]]) -> None:
        super().__init__()
        self._delivery = delivery
        self._tasks = tasks  # references deliveries that outlive their connections

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        delivery = asyncio.create_task(self._delivery.run(send))
        self._tasks.add(delivery)
        delivery.add_done_callback(self._tasks.discard)
        watcher = asyncio.create_task(self._watch(receive))
        try:
            await asyncio.shield(delivery)
        except asyncio.CancelledError:  # the server has waited for running requests long enough
            self._delivery.generation.fail("the server is stopping")  # its client may still read
            await asyncio.shield(delivery)
        finally:
            watcher.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watcher

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._delivery.client_gone()


def _start(status: int, content_type: str, headers: Mapping[str, str]) -> dict[str, Any]:
    pairs = [(name.lower().encode(), value.encode("latin-1")) for name, value in headers.items()]
    pairs.append((b"content-type", content_type.encode()))
    return {"type": "http.response.start", "status": status, "headers": pairs}


def _part(body: bytes, *, more: bool) -> dict[str, Any]:
    return {"type": "http.response.body", "body": body, "more_body": more}


def _failure_of(served: Served) -> ApiError | RemoteFault:
    """What the client is told of a request that the engine ended."""
    if served.fault is not None:
        return served.fault
    if FinishReason.UNMATCHED in served.finishes:
        return InvalidRequest(f"The answer ends without its form: {served.error}.")
    return GenerationFailed(f"The engine ended this request: {served.error}.")
