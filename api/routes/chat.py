"""POST /v1/chat/completions: messages in, one assistant message per choice out."""

import time
from dataclasses import dataclass, field, replace
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from api.admission import check_size, deliver, request_context, scope_for
from api.context import authorised, story_of, wire_of
from api.requests.generation import Delta, Job, Served
from api.requests.turns import turn_of
from api.routes.models import find_model
from api.routes.prompts import encode_chat, room_for_answer
from api.shapes.contents import contents_of
from api.shapes.logprobs import chat_logprobs, prompt_logprobs
from api.shapes.schemas import ChatBody, parse, sampling_params
from api.shapes.structured import source_asked
from api.shapes.usage import Asked, Bill, closing
from billing.gate.outcomes import Outcome
from engine.request import FinishReason, TokenLogprob

router = APIRouter(tags=["chat"])


@router.post("/v1/chat/completions")
@router.post("/chat/completions", include_in_schema=False)
async def chat_completions(request: Request) -> Response:
    """Answers as JSON, or as server-sent events with `stream`."""
    wire, story = wire_of(request), story_of(request)
    principal = await authorised(request)
    raw = await request.body()
    body = parse(raw, ChatBody)
    body.refuse_unserved()
    model = find_model(wire.models, body.model)
    check_size(wire, body, 1)
    logprobs = body.logprobs_asked
    tokens = await encode_chat(
        wire,
        model,
        body.messages,
        tools=body.tools if body.tool_choice != "none" else None,
        add_generation_prompt=body.add_generation_prompt is not False,
    )
    limit = room_for_answer(model, len(tokens), body.completion_limit, "messages")
    scope = scope_for(wire.salts, model, principal, body.extension.share)
    job = Job(
        request_id=story.request_id,
        model=model,
        prompts=(tokens,),
        params=sampling_params(body, max_tokens=limit, logprobs=logprobs),
        scope=scope,
        stop=body.stop_strings,
        source=source_asked(body),
        cache=body.extension.cache is not False,
        stream=bool(body.stream),
        arrival_ns=story.arrival_ns,
        context=request_context(request, principal, raw),
        contents=contents_of(
            body.extension, (tokens,), allow_perceptual=wire.settings.perceptual_digests
        ),
    )
    if wire.conversations is not None and job.cache:
        plain = [message.for_template(number) for number, message in enumerate(body.messages)]
        turn = turn_of(scope, plain, body.tools)
        parting = wire.conversations.parting(turn, tokens, model.tokenizer)
        job = replace(job, turn=turn, parting=parting)
    wire_format = ChatFormat(job, logprobs is not None, body.wants_usage_chunk)
    return await deliver(request, principal, job, body, wire_format, raw)


@dataclass(slots=True)
class _Gathered:
    """One choice of an answer that is sent whole."""

    text: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish: FinishReason | None = None


class ChatFormat:
    """Chat completion objects of one answer; see `api.requests.delivery.WireFormat`."""

    def __init__(self, job: Job, logprobs: bool, usage_follows: bool) -> None:
        self._job = job
        self._logprobs = logprobs
        self._usage_follows = usage_follows
        self._head = {
            "id": f"chatcmpl-{job.request_id}",
            "created": int(time.time()),
            "model": job.model.name,
        }
        self._gathered = [_Gathered() for _ in range(job.num_choices)]

    def opening(self) -> list[dict[str, Any]]:
        """Each choice's role, before any text."""
        role = {"role": "assistant", "content": ""}
        return [self._chunk(number, role, None) for number in range(self._job.num_choices)]

    def chunk(self, delta: Delta, outcome: Outcome) -> dict[str, Any] | None:
        if not delta.text and delta.finish is None and not (self._logprobs and delta.tokens):
            return None
        content = {"content": delta.text} if delta.text or delta.finish is None else {}
        chunk = self._chunk(delta.choice, content, delta.finish)
        if self._logprobs and delta.logprobs:
            told = chat_logprobs(self._job.model.tokenizer, delta.logprobs)
            chunk["choices"][0]["logprobs"] = told
        if delta.finish and outcome is Outcome.BUDGET:
            chunk["cachesvc"] = {"ended_by": "insufficient_balance"}
        return chunk

    def usage_chunk(self, served: Served, bill: Bill, asked: Asked) -> dict[str, Any]:
        chunk = self._object("chat.completion.chunk", [])
        return chunk | closing(served, bill, asked)

    def absorb(self, delta: Delta) -> None:
        gathered = self._gathered[delta.choice]
        gathered.text.append(delta.text)
        gathered.logprobs += delta.logprobs
        gathered.finish = delta.finish or gathered.finish

    def body(self, served: Served, bill: Bill, asked: Asked) -> dict[str, Any]:
        choices = [self._choice(number, one) for number, one in enumerate(self._gathered)]
        answer = self._object("chat.completion", choices) | closing(served, bill, asked)
        if self._job.params.prompt_logprobs is not None:
            told = served.prompt_logprobs[0]
            answer["prompt_logprobs"] = prompt_logprobs(self._job.model.tokenizer, told)
        return answer

    def _choice(self, number: int, gathered: _Gathered) -> dict[str, Any]:
        told = chat_logprobs(self._job.model.tokenizer, gathered.logprobs)
        message = {"role": "assistant", "content": "".join(gathered.text), "refusal": None}
        return {
            "index": number,
            "message": message,
            "logprobs": told if self._logprobs else None,
            "finish_reason": gathered.finish,
        }

    def _chunk(
        self, number: int, delta: dict[str, Any], finish: FinishReason | None
    ) -> dict[str, Any]:
        choice = {"index": number, "delta": delta, "logprobs": None, "finish_reason": finish}
        chunk = self._object("chat.completion.chunk", [choice])
        if self._usage_follows:
            chunk["usage"] = None
        return chunk

    def _object(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {**self._head, "object": kind, "choices": choices}
