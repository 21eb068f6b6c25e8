"""An answer as an OpenAI response: output items, whole or as events."""

import time
from collections.abc import Callable, Mapping
from itertools import count
from typing import Any, Final

from api.errors import ErrorAnswer
from api.headers import event
from api.job import COMPARED_TOKENS, Asked, Bill, Comparison, Delta, Job, PromptPart, Served
from api.shapes.chat import message_of
from api.shapes.reply import Reply
from api.shapes.responses import ResponsesBody
from api.shapes.usage import hit_classes, tier_answered, vendor_block, write_classes
from api.tools.pieces import CallArguments, CallStart, Piece, Text, Thought
from billing.usage import Usage
from engine.request import FinishReason

Keep = Callable[[dict[str, Any], dict[str, Any]], None]  # takes a response and its message


_CHANGES: Final = {
    PromptPart.MODEL: "model_changed",
    PromptPart.SYSTEM: "input_changed",
    PromptPart.TOOLS: "tools_changed",
    PromptPart.ARGUMENTS: "reasoning_effort_changed",
    PromptPart.MESSAGES: "input_changed",
}


def openai_diagnostics(found: Comparison | None, usage: Usage) -> dict[str, Any]:
    """How the prompt compares with an earlier response's.

    A prompt that goes on from it and did not hit has diverged in no part of the request.
    """
    if found is None:
        return {"type": "comparison_response_not_found"}
    if found.continues and usage.hit >= found.common_tokens - COMPARED_TOKENS:
        return {"type": "cache_hit"}
    if found.continues or found.changed is None:
        return {"type": "unavailable"}
    return {
        "type": "cache_miss",
        "reason": _CHANGES[found.changed],
        "cache_missed_tokens": found.missed_tokens,
        "comparison_reusable_tokens": found.common_tokens,
    }


class ResponsesFormat:
    """One response; see `api.requests.delivery.WireFormat`. `keep` takes it when it is answered.

    `found` compares its prompt with that of the response that the request names.
    """

    def __init__(
        self,
        job: Job,
        new_reply: Callable[[], Reply],
        body: ResponsesBody,
        keep: Keep,
        found: Comparison | None = None,
    ) -> None:
        self._job = job
        self._reply = new_reply()
        self._keep = keep
        self._items: list[dict[str, Any]] = []  # ended
        self._open: dict[str, Any] | None = None
        self._numbers = count()
        self._namespaces = body.namespaces
        self._head = _head(job, body)
        self._compares = _compared_with(body) is not None
        self._found = found

    def opening(self, usage: Usage) -> bytes:
        begun = self._response("in_progress", None)
        return self._event("response.created", response=begun) + self._event(
            "response.in_progress", response=begun
        )

    def chunk(self, delta: Delta) -> bytes:
        events = b"".join([self._written(piece) for piece in self._reply.read(delta)])
        return events + (self._close() if delta.finish is not None else b"")

    def closing(self, served: Served, bill: Bill, asked: Asked) -> bytes:
        ended = self._close()
        response = self._ended(served, bill, asked)
        return ended + self._event(f"response.{response['status']}", response=response)

    def error(self, answer: ErrorAnswer) -> bytes:
        failed = self._response("failed", None)
        failed["error"] = {"code": "server_error", "message": answer.message}
        return self._event("response.failed", response=failed)

    def refusal(self, answer: ErrorAnswer) -> dict[str, Any]:
        return answer.body()

    def absorb(self, delta: Delta) -> None:
        for piece in self._reply.read(delta):
            self._written(piece)
        if delta.finish is not None:
            self._close()

    def body(self, served: Served, bill: Bill, asked: Asked) -> dict[str, Any]:
        return self._ended(served, bill, asked)

    def _ended(self, served: Served, bill: Bill, asked: Asked) -> dict[str, Any]:
        cut = self._reply.finish is FinishReason.LENGTH
        response = self._response("incomplete" if cut else "completed", bill.usage)
        response |= tier_answered(self._job, bill)
        if self._compares:
            response["prompt_cache_diagnostics"] = openai_diagnostics(self._found, bill.usage)
        if cut:
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        self._keep(dict(response), message_of(self._reply))
        return response | vendor_block(served, bill, asked)

    def _response(self, status: str, usage: Usage | None) -> dict[str, Any]:
        payload = None if usage is None else _usage(usage, self._reply.reasoning_tokens)
        return {**self._head, "status": status, "output": list(self._items), "usage": payload}

    def _written(self, piece: Piece) -> bytes:
        match piece:
            case Text(text):
                return self._said("message", "output_text", text)
            case Thought(text):
                return self._said("reasoning", "reasoning_text", text)
            case CallStart(index, name):
                call = self._reply.calls[index]
                item = {"call_id": call.id, "name": name, "arguments": ""}
                if name in self._namespaces:
                    item["namespace"] = self._namespaces[name]
                return self._close() + self._begin("function_call", "fc", item)
            case CallArguments(_, text):
                assert self._open is not None
                self._open["arguments"] += text
                return self._more("response.function_call_arguments.delta", delta=text)

    def _said(self, kind: str, part: str, text: str) -> bytes:
        events = b""
        if self._open is None or self._open["type"] != kind:
            events = self._close() + self._begin_text(kind, part)
        assert self._open is not None
        self._open["content"][0]["text"] += text
        more: dict[str, Any] = {"logprobs": []} if part == "output_text" else {}
        return events + self._more(f"response.{part}.delta", content_index=0, delta=text, **more)

    def _begin_text(self, kind: str, part: str) -> bytes:
        if kind == "message":
            events = self._begin(kind, "msg", {"role": "assistant", "content": []})
        else:
            events = self._begin(kind, "rs", {"summary": [], "content": []})
        assert self._open is not None
        extra: dict[str, Any] = {"annotations": [], "logprobs": []} if kind == "message" else {}
        self._open["content"].append({"type": part, "text": "", **extra})
        shown = dict(self._open["content"][0])
        return events + self._more("response.content_part.added", content_index=0, part=shown)

    def _begin(self, kind: str, prefix: str, fields: Mapping[str, Any]) -> bytes:
        name = f"{prefix}_{self._job.request_id}_{len(self._items)}"
        self._open = {"id": name, "type": kind, "status": "in_progress", **fields}
        shown = {**self._open, **({"content": []} if "content" in fields else {})}
        return self._event("response.output_item.added", output_index=len(self._items), item=shown)

    def _close(self) -> bytes:
        """Ends the open item."""
        if self._open is None:
            return b""
        item, events = self._open, b""
        if item["type"] == "function_call":
            payload = {"name": item["name"], "arguments": item["arguments"]}
            events = self._more("response.function_call_arguments.done", **payload)
        else:
            part = item["content"][0]
            payload = {"text": part["text"]} | ({"logprobs": []} if "logprobs" in part else {})
            events = self._more(f"response.{part['type']}.done", content_index=0, **payload)
            events += self._more("response.content_part.done", content_index=0, part=part)
        cut = self._reply.finish is FinishReason.LENGTH
        item["status"] = "incomplete" if cut else "completed"
        events += self._event("response.output_item.done", output_index=len(self._items), item=item)
        self._items.append(item)
        self._open = None
        return events

    def _more(self, kind: str, **fields: Any) -> bytes:
        """An event of the open item."""
        assert self._open is not None
        place = {"item_id": self._open["id"], "output_index": len(self._items)}
        return self._event(kind, **place, **fields)

    def _event(self, kind: str, **fields: Any) -> bytes:
        return event({"type": kind, "sequence_number": next(self._numbers), **fields}, kind)


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
    shown: dict[str, Any] = {"mode": options.mode or "implicit", "ttl": options.ttl or "30m"}
    if options.comparison_response_id is not None:
        shown["comparison_response_id"] = options.comparison_response_id
    return {"prompt_cache_options": shown}


def _compared_with(body: ResponsesBody) -> str | None:
    options = body.prompt_cache_options
    return options.comparison_response_id if options is not None else None


def _usage(usage: Usage, reasoning_tokens: int) -> dict[str, Any]:
    """The billed usage in the classes of Responses."""
    return {
        "input_tokens": usage.prompt,
        "input_tokens_details": {
            "cached_tokens": usage.hit,
            "cache_write_tokens": usage.written,
            "cached_tokens_details": hit_classes(usage),
            **write_classes(usage),
        },
        "output_tokens": usage.output,
        "output_tokens_details": {"reasoning_tokens": reasoning_tokens},
        "total_tokens": usage.prompt + usage.output,
    }
