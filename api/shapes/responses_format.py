"""An answer as an OpenAI response: output items, whole or as events."""

import time
from collections.abc import Callable, Mapping
from itertools import count
from typing import Any

from api.errors import ErrorAnswer
from api.headers import event
from api.job import Asked, Bill, Job, Served
from api.shapes.answer import ItemsFormat
from api.shapes.chat import message_of
from api.shapes.reply import Reply
from api.shapes.responses import ResponsesBody
from api.shapes.usage import responses_usage, tier_answered, vendor_block
from api.tools.pieces import CallStart, Text, Thought
from billing.usage import Usage
from engine.request import FinishReason

Keep = Callable[[dict[str, Any], dict[str, Any]], None]  # takes a response and its message


class ResponsesFormat(ItemsFormat):
    """One response. `keep` takes it when it is answered."""

    def __init__(self, job: Job, reply: Reply, body: ResponsesBody, keep: Keep) -> None:
        super().__init__(job, reply)
        self._keep = keep
        self._items: list[dict[str, Any]] = []  # ended
        self._item: dict[str, Any] = {}  # open
        self._numbers = count()
        self._namespaces = body.namespaces
        self._head = _head(job, body)

    def opening(self, usage: Usage) -> bytes:
        begun = self._response("in_progress", None)
        return self._event("response.created", response=begun) + self._event(
            "response.in_progress", response=begun
        )

    def closing(self, served: Served, bill: Bill, asked: Asked) -> bytes:
        ended = self._close()
        response = self._ended(served, bill, asked)
        return ended + self._event(f"response.{response['status']}", response=response)

    def error(self, answer: ErrorAnswer) -> bytes:
        failed = self._response("failed", None)
        failed["error"] = {"code": "server_error", "message": answer.message}
        return self._event("response.failed", response=failed)

    def body(self, served: Served, bill: Bill, asked: Asked) -> dict[str, Any]:
        return self._ended(served, bill, asked)

    def _ended(self, served: Served, bill: Bill, asked: Asked) -> dict[str, Any]:
        cut = self._reply.finish is FinishReason.LENGTH
        response = self._response("incomplete" if cut else "completed", bill.usage)
        response |= tier_answered(self._job, bill)
        if cut:
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        self._keep(dict(response), message_of(self._reply))
        return response | vendor_block(served, bill, asked)

    def _response(self, status: str, usage: Usage | None) -> dict[str, Any]:
        payload = None if usage is None else responses_usage(usage, self._reply.reasoning_tokens)
        return {**self._head, "status": status, "output": list(self._items), "usage": payload}

    def _begin(self, piece: Text | Thought | CallStart) -> bytes:
        match piece:
            case Text():
                extra: dict[str, Any] = {"annotations": [], "logprobs": []}
                return self._begin_text("output_text", extra, "message", "msg", role="assistant")
            case Thought():
                return self._begin_text("reasoning_text", {}, "reasoning", "rs", summary=[])
            case CallStart(index, name):
                item = {"call_id": self._reply.calls[index].id, "name": name, "arguments": ""}
                if name in self._namespaces:
                    item["namespace"] = self._namespaces[name]
                return self._begin_item("function_call", "fc", **item)

    def _begin_text(
        self, part: str, extra: Mapping[str, Any], kind: str, prefix: str, **fields: Any
    ) -> bytes:
        """Opens an item and its only part."""
        events = self._begin_item(kind, prefix, **fields, content=[])
        shown = {"type": part, "text": "", **extra}
        self._item["content"].append(shown)
        return events + self._of_part("response.content_part.added", part=shown)

    def _begin_item(self, kind: str, prefix: str, **fields: Any) -> bytes:
        name = f"{prefix}_{self._job.request_id}_{len(self._items)}"
        self._item = {"id": name, "type": kind, "status": "in_progress", **fields}
        return self._of_answer("response.output_item.added")

    def _more(self, text: str) -> bytes:
        if self._open is CallStart:
            self._item["arguments"] += text
            return self._of_item("response.function_call_arguments.delta", delta=text)
        part = self._item["content"][0]
        part["text"] += text
        return self._of_part(f"response.{part['type']}.delta", delta=text, **_no_logprobs(part))

    def _end(self) -> bytes:
        item = self._item
        if self._open is CallStart:
            payload = {"name": item["name"], "arguments": item["arguments"]}
            events = self._of_item("response.function_call_arguments.done", **payload)
        else:
            part = item["content"][0]
            payload = {"text": part["text"], **_no_logprobs(part)}
            events = self._of_part(f"response.{part['type']}.done", **payload)
            events += self._of_part("response.content_part.done", part=part)
        cut = self._reply.finish is FinishReason.LENGTH
        item["status"] = "incomplete" if cut else "completed"
        events += self._of_answer("response.output_item.done")
        self._items.append(item)
        return events

    def _of_answer(self, kind: str) -> bytes:
        """An event of the answer about the open item."""
        return self._event(kind, output_index=len(self._items), item=self._item)

    def _of_item(self, kind: str, **fields: Any) -> bytes:
        return self._event(kind, item_id=self._item["id"], output_index=len(self._items), **fields)

    def _of_part(self, kind: str, **fields: Any) -> bytes:
        return self._of_item(kind, content_index=0, **fields)

    def _event(self, kind: str, **fields: Any) -> bytes:
        return event({"type": kind, "sequence_number": next(self._numbers), **fields}, kind)


def _no_logprobs(part: Mapping[str, Any]) -> dict[str, Any]:
    """The field that events of a part repeat, if it has it."""
    return {"logprobs": []} if "logprobs" in part else {}


def _head(job: Job, body: ResponsesBody) -> dict[str, Any]:
    """The fields of a response that repeat the request's."""
    reasoning = body.reasoning
    return {
        "id": f"resp_{job.request_id}",
        "object": "response",
        "created_at": int(time.time()),
        "model": job.model.name,
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "prompt_cache_key": body.prompt_cache_key,
        **_cache_options(body),
        "reasoning": {
            "effort": reasoning.effort if reasoning else None,
            "summary": reasoning.summary if reasoning else None,
        },
        "store": body.store is not False,
        "temperature": body.temperature,
        "text": {"format": body.shown_format()},
        "tool_choice": body.shown_choice(),
        "tools": body.shown_tools(),
        "top_p": body.top_p,
        "truncation": "disabled",
        "user": body.user,
    }


def _cache_options(body: ResponsesBody) -> dict[str, Any]:
    """The options that were applied."""
    options = body.prompt_cache_options
    if options is None:
        return {}
    shown = {"mode": options.mode or "implicit", "ttl": options.ttl or "30m"}
    return {"prompt_cache_options": shown}
