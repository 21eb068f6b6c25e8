"""How an answer is written, in every protocol: whole, or as events. `api.requests.delivery` calls.

Two shapes are in use: choices, which chats and completions have, and items of which one is open.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from api.errors import ErrorAnswer, ended_by
from api.headers import DONE, event
from api.job import Asked, Bill, Delta, Job, Served
from api.shapes.reply import Reply
from api.shapes.usage import closing, tier_answered
from api.tools.pieces import CallArguments, CallStart, Piece, Text, Thought
from billing.usage import Usage
from engine.request import TokenLogprob


class WireFormat(ABC):
    """How one protocol writes one answer. Errors are OpenAI's, unless it has its own."""

    def opening(self, usage: Usage) -> bytes:
        """The events before any text, called first. `usage` is empty while the request waits."""
        return b""

    def chunk(self, delta: Delta) -> bytes:
        """The events of a delta; empty if it has nothing to show yet."""
        return b""

    def closing(self, served: Served, bill: Bill, asked: Asked) -> bytes:
        """The events after the settlement, up to the end of the stream."""
        return b""

    def error(self, answer: ErrorAnswer) -> bytes:
        """The events that end a stream that fails."""
        return event(answer.body()) + DONE

    def absorb(self, delta: Delta) -> None:
        """Takes in a delta of an answer that is sent whole."""
        self.chunk(delta)

    @abstractmethod
    def body(self, served: Served, bill: Bill, asked: Asked) -> Mapping[str, Any]:
        """The whole answer."""

    def refusal(self, answer: ErrorAnswer) -> Mapping[str, Any]:
        """The body for an answer that failed."""
        return answer.body()


class ChoicesFormat(WireFormat):
    """An answer in choices, each read by its reply."""

    prefix: ClassVar[str]  # of its id
    kind: ClassVar[str]
    chunk_kind: ClassVar[str]

    def __init__(self, job: Job, replies: Sequence[Reply], *, usage_follows: bool) -> None:
        self._job = job
        self._replies = replies
        self._usage_follows = usage_follows
        self._head = {
            "id": f"{self.prefix}-{job.request_id}",
            "created": int(time.time()),
            "model": job.model.name,
        }

    def closing(self, served: Served, bill: Bill, asked: Asked) -> bytes:
        if not self._usage_follows and asked == Asked():
            return DONE
        chunk = {**self._head, "object": self.chunk_kind, "choices": []}
        return event(chunk | self._closing(served, bill, asked)) + DONE

    def absorb(self, delta: Delta) -> None:
        self._replies[delta.choice].read(delta)

    def body(self, served: Served, bill: Bill, asked: Asked) -> dict[str, Any]:
        choices = [
            {
                "index": number,
                **self._said(number, reply),
                "logprobs": self._logprobs(number, reply.logprobs, served),
                "finish_reason": reply.finish_reason,
            }
            for number, reply in enumerate(self._replies)
        ]
        whole = {**self._head, "object": self.kind, "choices": choices}
        return whole | self._closing(served, bill, asked)

    @abstractmethod
    def _said(self, number: int, reply: Reply) -> dict[str, Any]:
        """What a whole choice says."""

    @abstractmethod
    def _logprobs(
        self, number: int, tokens: Sequence[TokenLogprob], served: Served | None = None
    ) -> dict[str, Any] | None:
        """Those of a delta's tokens; with `served`, of a whole choice. None if not asked for."""

    def _chunk(
        self,
        number: int,
        said: Mapping[str, Any],
        logprobs: Mapping[str, Any] | None = None,
        ended: Delta | None = None,
    ) -> bytes:
        """One event of a choice; the last has the delta that `ended` it."""
        reason = self._replies[number].finish_reason if ended is not None else None
        choice = {"index": number, **said, "logprobs": logprobs, "finish_reason": reason}
        chunk: dict[str, Any] = {**self._head, "object": self.chunk_kind, "choices": [choice]}
        if self._usage_follows:
            chunk["usage"] = None
        if ended is not None and ended.refusal is not None:
            chunk["cachesvc"] = ended_by(ended.refusal)
        return event(chunk)

    def _closing(self, served: Served, bill: Bill, asked: Asked) -> dict[str, Any]:
        thought = sum(reply.reasoning_tokens for reply in self._replies)
        told = closing(served, bill, asked, reasoning_tokens=thought)
        return tier_answered(self._job, bill) | told


class ItemsFormat(WireFormat):
    """An answer in items: texts, thoughts and calls, of which the last may be open."""

    def __init__(self, job: Job, reply: Reply) -> None:
        self._job = job
        self._reply = reply
        self._open: type[Piece] | None = None  # what the open item consists of

    def chunk(self, delta: Delta) -> bytes:
        events = b"".join([self._written(piece) for piece in self._reply.read(delta)])
        return events + (self._close() if delta.finish is not None else b"")

    def _written(self, piece: Piece) -> bytes:
        if isinstance(piece, CallArguments):
            return self._more(piece.text)
        begun = b""
        if isinstance(piece, CallStart) or self._open is not type(piece):
            begun = self._close() + self._begin(piece)
            self._open = type(piece)
        return begun if isinstance(piece, CallStart) else begun + self._more(piece.text)

    def _close(self) -> bytes:
        """Ends the open item, if there is one."""
        events = b"" if self._open is None else self._end()
        self._open = None
        return events

    @abstractmethod
    def _begin(self, piece: Text | Thought | CallStart) -> bytes:
        """The events that open an item for this piece, without its text."""

    @abstractmethod
    def _more(self, text: str) -> bytes:
        """The event of further text, or of a call's arguments, in the open item."""

    @abstractmethod
    def _end(self) -> bytes:
        """The events that close the open item."""
