"""An answer as an Anthropic message, whole or as events; and errors in Anthropic's shape."""

from typing import Any

import orjson

from api.errors import ErrorAnswer
from api.headers import event
from api.job import Asked, Bill, Delta, Job, Served
from api.shapes.answer import ItemsFormat
from api.shapes.reply import Reply
from api.shapes.usage import hit_classes, vendor_block, write_classes
from api.tools.pieces import CallStart, Text, Thought
from billing.usage import Usage
from engine.request import FinishReason

_KINDS = {
    401: "authentication_error",
    402: "billing_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def anthropic_error(answer: ErrorAnswer) -> dict[str, Any]:
    """An error in Anthropic's shape; `param` and `code` are this server's additions."""
    other = "invalid_request_error" if answer.status < 500 else "api_error"
    error: dict[str, Any] = {"type": _KINDS.get(answer.status, other), "message": answer.message}
    error |= {"param": answer.param} if answer.param else {}
    error |= {"code": answer.code} if answer.code else {}
    error |= answer.about
    return {"type": "error", "error": error}


def anthropic_usage(usage: Usage, service_tier: str = "") -> dict[str, Any]:
    """Usage in Anthropic's classes: cache read, cache written and other input sum to the prompt."""
    written = usage.written
    return {
        "input_tokens": usage.miss - written,
        "cache_read_input_tokens": usage.hit,
        "cache_read_input_tokens_details": hit_classes(usage),
        "cache_creation_input_tokens": written,
        "cache_creation": {
            "ephemeral_5m_input_tokens": usage.cache_write + usage.explicit_write,
            "ephemeral_1h_input_tokens": usage.cache_write_1h,
        },
        **write_classes(usage),
        "output_tokens": usage.output,
        "service_tier": service_tier or "standard",
    }


class MessagesFormat(ItemsFormat):
    """One message."""

    def __init__(self, job: Job, reply: Reply) -> None:
        super().__init__(job, reply)
        self._num_blocks = 0  # opened so far
        self._field = ""  # of the open block's deltas, which are of type <field>_delta

    def opening(self, usage: Usage) -> bytes:
        if not usage.prompt:  # not admitted yet, so its classes are unknown
            usage = Usage(miss=self._job.prompt_tokens)
        message = self._message([], None, anthropic_usage(usage))
        return _event({"type": "message_start", "message": message})

    def closing(self, served: Served, bill: Bill, asked: Asked) -> bytes:
        reason = {"stop_reason": self._reason(), "stop_sequence": self._reply.stop}
        ended = {
            "type": "message_delta",
            "delta": reason,
            "usage": anthropic_usage(bill.usage, bill.service_tier),
            **vendor_block(served, bill, asked),
        }
        return self._close() + _event(ended) + _event({"type": "message_stop"})

    def error(self, answer: ErrorAnswer) -> bytes:
        return _event(anthropic_error(answer))

    def refusal(self, answer: ErrorAnswer) -> dict[str, Any]:
        return anthropic_error(answer)

    def absorb(self, delta: Delta) -> None:
        self._reply.read(delta)

    def body(self, served: Served, bill: Bill, asked: Asked) -> dict[str, Any]:
        reply, content = self._reply, list[dict[str, Any]]()
        if reply.thoughts:
            content.append({"type": "thinking", "thinking": reply.thought, "signature": ""})
        if reply.texts or not reply.calls:
            content.append({"type": "text", "text": reply.text})
        for call in reply.calls:
            given = _read(call.written)
            content.append({"type": "tool_use", "id": call.id, "name": call.name, "input": given})
        message = self._message(
            content, self._reason(), anthropic_usage(bill.usage, bill.service_tier)
        )
        return message | vendor_block(served, bill, asked)

    def _message(
        self, content: list[dict[str, Any]], reason: str | None, usage: dict[str, Any]
    ) -> dict[str, Any]:
        return {
            "id": f"msg_{self._job.request_id}",
            "type": "message",
            "role": "assistant",
            "model": self._job.model.name,
            "content": content,
            "stop_reason": reason,
            "stop_sequence": self._reply.stop,
            "usage": usage,
        }

    def _reason(self) -> str | None:
        reply = self._reply
        if reply.called:
            return "tool_use"
        if reply.finish is FinishReason.LENGTH:
            return "max_tokens"
        return "stop_sequence" if reply.stop is not None else "end_turn"

    def _begin(self, piece: Text | Thought | CallStart) -> bytes:
        block: dict[str, Any]
        match piece:
            case Text():
                block, self._field = {"type": "text", "text": ""}, "text"
            case Thought():
                block = {"type": "thinking", "thinking": "", "signature": ""}
                self._field = "thinking"
            case CallStart(index, name):
                call_id = self._reply.calls[index].id
                block = {"type": "tool_use", "id": call_id, "name": name, "input": {}}
                self._field = "partial_json"
        self._num_blocks += 1
        return self._of_block("start", content_block=block)

    def _more(self, text: str) -> bytes:
        kind = "input_json" if self._field == "partial_json" else self._field
        return self._of_block("delta", delta={"type": f"{kind}_delta", self._field: text})

    def _end(self) -> bytes:
        return self._of_block("stop")

    def _of_block(self, what: str, **fields: Any) -> bytes:
        kind = f"content_block_{what}"
        return _event({"type": kind, "index": self._num_blocks - 1, **fields})


def _read(arguments: str) -> Any:
    """A call's arguments; empty if the answer was cut off inside them."""
    try:
        read = orjson.loads(arguments or "{}")
    except orjson.JSONDecodeError:
        return {}
    return read if isinstance(read, dict) else {}


def _event(document: dict[str, Any]) -> bytes:
    return event(document, document["type"])
