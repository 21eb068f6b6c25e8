"""POST /v1/completions: one or several prompts in, plain text out."""

import asyncio
from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from api.admission import deliver
from api.context import Arrival, received, request_context
from api.job import Delta, Job, Served
from api.relay.protocol import COMPLETIONS
from api.routes.prompts import encode_prompt
from api.routes.relayed import relayed
from api.served_model import find_model
from api.shapes.answer import ChoicesFormat
from api.shapes.body import parse
from api.shapes.logprobs import TextLogprobs
from api.shapes.reply import Reply
from api.shapes.schemas import CompletionBody
from api.shapes.structured import source_asked
from api.tools.pieces import Plain
from billing.usage import Usage
from engine.request import TokenLogprob

router = APIRouter(tags=["completions"])


@router.post("/v1/completions")
@router.post("/completions", include_in_schema=False)
async def completions(request: Request) -> Response:
    """Answers as JSON, or as server-sent events with `stream`."""
    arrival = await received(request, queues=True)
    if (passed := await relayed(arrival, COMPLETIONS)) is not None:
        return passed
    body = parse(arrival.raw, CompletionBody)
    job = await completion_job(arrival, body)
    echoes = _echoes(job, body)
    wire_format = CompletionFormat(job, echoes, usage_follows=body.wants_usage_chunk)
    return await deliver(arrival, job, body.extension, wire_format)


async def completion_job(arrival: Arrival, body: CompletionBody) -> Job:
    """The job of a body. Raises what is wrong with it, by field."""
    wire, log, tenant = arrival.wire, arrival.log, arrival.principal.tenant
    log.add(ignored_fields=body.check(wire.settings.max_choices) or None)
    model = find_model(wire.inference.models, body.model)
    encoding = [encode_prompt(wire, model, each, tenant=tenant) for each in body.prompts()]
    prompts = [await encoding[0]] if len(encoding) == 1 else await asyncio.gather(*encoding)
    # What fits after every prompt. Without max_tokens: the default, or less if less fits.
    limit = model.room_for_answer(max(map(len, prompts)), body.max_tokens, prompt="prompt")
    if body.max_tokens is None:
        limit = min(limit, wire.settings.default_completion_tokens)
    return Job(
        request_id=log.request_id,
        model=model,
        prompts=tuple(prompts),
        params=body.sampling(limit),
        tenant=tenant,
        scope=wire.access.salts.scoped(model.scope, tenant, body.extension.share),
        stop=body.stop_strings,
        source=source_asked(body),
        cache=body.extension.cache is not False,
        stream=bool(body.stream),
        arrival_ns=log.arrival_ns,
        context=request_context(arrival, body),
        contents=body.apart,
    )


def _echoes(job: Job, body: CompletionBody) -> list[str]:
    """The text before each prompt's answers; empty strings without `echo`."""
    if not body.echo:
        return ["" for _ in job.prompts]
    decode = job.model.tokenizer.decode
    return [
        text if isinstance(text, str) else decode(tokens)
        for text, tokens in zip(body.prompts(), job.prompts, strict=True)
    ]


class CompletionFormat(ChoicesFormat):
    """Text completion objects of one answer."""

    prefix = "cmpl"
    kind = chunk_kind = "text_completion"

    def __init__(self, job: Job, echoes: list[str], *, usage_follows: bool) -> None:
        self._echoes = [echo for echo in echoes for _ in range(job.params.n)]
        replies = [Reply(Plain()) for _ in self._echoes]
        super().__init__(job, replies, usage_follows=usage_follows)
        self._streamed = [TextLogprobs(job.model.tokenizer) for _ in self._echoes]

    def opening(self, usage: Usage) -> bytes:
        """The echoed prompts; nothing without `echo`."""
        return b"".join(self._chunk(n, {"text": one}) for n, one in enumerate(self._echoes) if one)

    def chunk(self, delta: Delta) -> bytes:
        self.absorb(delta)
        shown = self._logprobs(delta.choice, delta.logprobs) if delta.logprobs else None
        if not delta.text and delta.finish is None and shown is None:
            return b""
        ended = delta if delta.finish else None
        return self._chunk(delta.choice, {"text": delta.text}, shown, ended)

    def _said(self, number: int, reply: Reply) -> dict[str, Any]:
        return {"text": self._echoes[number] + reply.text}

    def _logprobs(
        self, number: int, tokens: Sequence[TokenLogprob], served: Served | None = None
    ) -> dict[str, Any] | None:
        """With an echo, the prompt's are before the answer's."""
        if self._job.params.logprobs is None:
            return None
        if served is None:
            return self._streamed[number].columns(tokens)
        whole, prompt = TextLogprobs(self._job.model.tokenizer), number // self._job.params.n
        if not self._echoes[number]:
            return whole.columns(tokens)
        first = self._job.prompts[prompt][0]
        return whole.columns([*served.prompt_logprobs[prompt], *tokens], first=first)
