"""An answer as chat completion objects, whole or in chunks; see `api.requests.delivery`."""

import time
from collections.abc import Callable, Mapping
from typing import Any

from api.errors import ErrorAnswer, ended_by
from api.headers import DONE, event
from api.job import Asked, Bill, Delta, Job, Served
from api.shapes.logprobs import chat_logprobs, prompt_logprobs
from api.shapes.reply import Reply, ToolCall
from api.shapes.usage import closing, tier_answered
from api.tools.pieces import CallArguments, CallStart, Piece, Text, Thought
from billing.usage import Usage


class ChatFormat:
    """Chat completion objects of one answer."""

    def __init__(
        self, job: Job, new_reply: Callable[[], Reply], *, logprobs: bool, usage_follows: bool
    ) -> None:
        self._job = job
        self._logprobs = logprobs
        self._usage_follows = usage_follows
        self._head = {
            "id": f"chatcmpl-{job.request_id}",
            "created": int(time.time()),
            "model": job.model.name,
        }
        self._replies = [new_reply() for _ in range(job.num_choices)]

    def opening(self, usage: Usage) -> bytes:
        """Each choice's role, before any text."""
        role = {"role": "assistant", "content": ""}
        return b"".join(event(self._chunk(n, role)) for n in range(self._job.num_choices))

    def chunk(self, delta: Delta) -> bytes:
        reply = self._replies[delta.choice]
        deltas = [self._delta(reply, piece) for piece in reply.read(delta)]
        has_logprobs = self._logprobs and bool(delta.tokens)
        if not deltas and (delta.finish or has_logprobs):
            deltas = [{}] if delta.finish else [{"content": ""}]
        chunks = [self._chunk(delta.choice, one) for one in deltas]
        if chunks and self._logprobs and delta.logprobs:
            shown = chat_logprobs(self._job.model.tokenizer, delta.logprobs)
            chunks[0]["choices"][0]["logprobs"] = shown
        if chunks and delta.finish:
            chunks[-1]["choices"][0]["finish_reason"] = _finish(reply)
            if delta.refusal is not None:
                chunks[-1]["cachesvc"] = ended_by(delta.refusal)
        return b"".join(map(event, chunks))

    def closing(self, served: Served, bill: Bill, asked: Asked) -> bytes:
        if not self._usage_follows and asked == Asked():
            return DONE
        chunk = self._object("chat.completion.chunk", [])
        return event(chunk | self._closing(served, bill, asked)) + DONE

    def absorb(self, delta: Delta) -> None:
        self._replies[delta.choice].read(delta)

    def body(self, served: Served, bill: Bill, asked: Asked) -> dict[str, Any]:
        choices = [self._choice(number, one) for number, one in enumerate(self._replies)]
        answer = self._object("chat.completion", choices) | self._closing(served, bill, asked)
        if self._job.params.prompt_logprobs is not None:
            shown = served.prompt_logprobs[0]
            answer["prompt_logprobs"] = prompt_logprobs(self._job.model.tokenizer, shown)
        return answer

    def error(self, answer: ErrorAnswer) -> bytes:
        return event(answer.body()) + DONE

    def refusal(self, answer: ErrorAnswer) -> dict[str, Any]:
        return answer.body()

    def _closing(self, served: Served, bill: Bill, asked: Asked) -> dict[str, Any]:
        thought = sum(reply.reasoning_tokens for reply in self._replies)
        closing_fields = closing(served, bill, asked, reasoning_tokens=thought)
        return tier_answered(self._job, bill) | closing_fields

    def _delta(self, reply: Reply, piece: Piece) -> dict[str, Any]:
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

    def _choice(self, number: int, reply: Reply) -> dict[str, Any]:
        shown = chat_logprobs(self._job.model.tokenizer, reply.logprobs)
        return {
            "index": number,
            "message": message_of(reply),
            "logprobs": shown if self._logprobs else None,
            "finish_reason": _finish(reply),
        }

    def _chunk(self, number: int, delta: Mapping[str, Any]) -> dict[str, Any]:
        choice = {"index": number, "delta": delta, "logprobs": None, "finish_reason": None}
        chunk = self._object("chat.completion.chunk", [choice])
        if self._usage_follows:
            chunk["usage"] = None
        return chunk

    def _object(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {**self._head, "object": kind, "choices": choices}


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


def _finish(reply: Reply) -> str | None:
    return "tool_calls" if reply.called else reply.finish
