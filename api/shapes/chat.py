"""An answer as chat completion objects, whole or in chunks."""

from collections.abc import Mapping, Sequence
from typing import Any

from api.job import Delta, Job, Served
from api.shapes.answer import ChoicesFormat
from api.shapes.logprobs import chat_logprobs
from api.shapes.reply import Reply, ToolCall
from api.tools.pieces import CallArguments, CallStart, Piece, Text, Thought
from billing.usage import Usage
from engine.request import TokenLogprob


class ChatFormat(ChoicesFormat):
    """Chat completion objects of one answer."""

    prefix = "chatcmpl"
    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def __init__(
        self, job: Job, replies: Sequence[Reply], *, logprobs: bool, usage_follows: bool
    ) -> None:
        super().__init__(job, replies, usage_follows=usage_follows)
        self._shows_logprobs = logprobs

    def opening(self, usage: Usage) -> bytes:
        """Each choice's role, before any text."""
        role = {"delta": {"role": "assistant", "content": ""}}
        return b"".join(self._chunk(number, role) for number in range(len(self._replies)))

    def chunk(self, delta: Delta) -> bytes:
        reply = self._replies[delta.choice]
        deltas = [_delta(reply, piece) for piece in reply.read(delta)]
        if not deltas and (delta.finish or (self._shows_logprobs and delta.tokens)):
            deltas = [{} if delta.finish else {"content": ""}]
        shown = self._logprobs(delta.choice, delta.logprobs) if delta.logprobs else None
        last = len(deltas) - 1 if delta.finish else None
        return b"".join(
            self._chunk(
                delta.choice,
                {"delta": one},
                shown if number == 0 else None,
                delta if number == last else None,
            )
            for number, one in enumerate(deltas)
        )

    def _said(self, number: int, reply: Reply) -> dict[str, Any]:
        return {"message": message_of(reply)}

    def _logprobs(
        self, number: int, tokens: Sequence[TokenLogprob], served: Served | None = None
    ) -> dict[str, Any] | None:
        return chat_logprobs(self._job.model.tokenizer, tokens) if self._shows_logprobs else None


def _delta(reply: Reply, piece: Piece) -> Mapping[str, Any]:
    match piece:
        case Text(text):
            return {"content": text}
        case Thought(text):
            return {"reasoning_content": text}
        case CallStart(index, _):
            begun = {"index": index, **call_object(reply.calls[index], arguments="")}
            return {"tool_calls": [begun]}
        case CallArguments(index, text):
            return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}


def message_of(reply: Reply) -> dict[str, Any]:
    """The assistant's message, without text if it only calls tools."""
    text: str | None = reply.text
    message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
    if reply.thoughts:
        message["reasoning_content"] = reply.thought
    if reply.calls:
        message["content"] = text or None
        message["tool_calls"] = [call_object(call) for call in reply.calls]
    return message


def call_object(call: ToolCall, arguments: str | None = None) -> dict[str, Any]:
    written = call.written if arguments is None else arguments
    function = {"name": call.name, "arguments": written}
    return {"id": call.id, "type": "function", "function": function}
