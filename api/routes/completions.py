"""POST /v1/completions: one or several prompts in, plain text out."""

import asyncio
import time
from array import array
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from api.admission import deliver
from api.collaborators import Collaborators
from api.context import Arrival, received, request_context
from api.errors import ErrorAnswer, ended_by
from api.headers import DONE, event, names_of
from api.job import Asked, Bill, Delta, Job, Served
from api.relay.protocol import COMPLETIONS
from api.routes.prompts import encode_prompt
from api.routes.relayed import relayed
from api.served_model import ServedModel, find_model
from api.shapes.apart import contents_of
from api.shapes.body import parse
from api.shapes.logprobs import prompt_logprobs, text_decoder, text_logprobs, text_of
from api.shapes.schemas import CompletionBody
from api.shapes.structured import source_asked
from api.shapes.usage import closing, tier_answered
from billing.usage import Usage
from engine.request import FinishReason, TokenLogprob

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
    wire_format = CompletionFormat(
        job, echoes, body.wants_usage_chunk, prompt_logprobs=body.prompt_logprobs is not None
    )
    return await deliver(arrival, job, body.extension, wire_format)


async def completion_job(arrival: Arrival, body: CompletionBody) -> Job:
    """The job of a body. Raises what is wrong with it, by field."""
    wire, log, tenant = arrival.wire, arrival.log, arrival.principal.tenant
    log.add(ignored_fields=body.check(wire.settings.max_choices) or None)
    model = find_model(wire.inference.models, body.model)
    encoding = (encode_prompt(wire, model, each, tenant=tenant) for each in body.prompts())
    prompts = await asyncio.gather(*encoding)
    return Job(
        request_id=log.request_id,
        model=model,
        prompts=tuple(prompts),
        params=body.sampling(_answer_limit(wire, model, body, prompts)),
        tenant=tenant,
        scope=wire.access.salts.scoped(model.scope, tenant, body.extension.share),
        stop=body.stop_strings,
        source=source_asked(body),
        cache=body.extension.cache is not False,
        stream=bool(body.stream),
        arrival_ns=log.arrival_ns,
        context=request_context(arrival, body, names_of(arrival.request)),
        contents=contents_of(body.apart),
    )


def _answer_limit(
    wire: Collaborators,
    model: ServedModel,
    body: CompletionBody,
    prompts: list["array[int]"],
) -> int:
    """The answer length that fits after every prompt. Without max_tokens: the default, or less if
    less fits."""
    longest = max(map(len, prompts))
    if body.max_tokens is not None:
        return model.room_for_answer(longest, body.max_tokens, prompt="prompt")
    room = model.room_for_answer(longest, None, prompt="prompt")
    return min(room, wire.settings.default_completion_tokens)


def _echoes(job: Job, body: CompletionBody) -> list[str]:
    """The text before each prompt's answers; empty strings without `echo`."""
    if not body.echo:
        return ["" for _ in job.prompts]
    decode = job.model.tokenizer.decode
    return [
        text if isinstance(text, str) else decode(tokens)
        for text, tokens in zip(body.prompts(), job.prompts, strict=True)
    ]


class CompletionFormat:
    """Text completion objects of one answer; see `api.requests.delivery.WireFormat`."""

    def __init__(
        self, job: Job, echoes: list[str], usage_follows: bool, *, prompt_logprobs: bool = False
    ) -> None:
        self._job = job
        self._prompt_logprobs = prompt_logprobs
        self._echoes = [echo for echo in echoes for _ in range(job.params.n)]
        self._usage_follows = usage_follows
        self._head = {
            "id": f"cmpl-{job.request_id}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": job.model.name,
        }
        self._offsets = [len(echo) for echo in self._echoes]
        self._decoders = [text_decoder() for _ in self._echoes]
        self._texts: list[list[str]] = [[echo] for echo in self._echoes]
        self._logprobs: list[list[TokenLogprob]] = [[] for _ in self._echoes]
        self._finishes: list[FinishReason | None] = [None for _ in self._echoes]

    def opening(self, usage: Usage) -> bytes:
        """The echoed prompts; nothing without `echo`."""
        echoes = enumerate(self._echoes)
        return b"".join(event(self._chunk(n, echo, None, None)) for n, echo in echoes if echo)

    def chunk(self, delta: Delta) -> bytes:
        shown = self._logprobs_of(delta)
        if not delta.text and delta.finish is None and shown is None:
            return b""
        chunk = self._chunk(delta.choice, delta.text, shown, delta.finish)
        if delta.refusal is not None:
            chunk["cachesvc"] = ended_by(delta.refusal)
        return event(chunk)

    def closing(self, served: Served, bill: Bill, asked: Asked) -> bytes:
        if not self._usage_follows and asked == Asked():
            return DONE
        return event(self._head | {"choices": []} | self._closing(served, bill, asked)) + DONE

    def error(self, answer: ErrorAnswer) -> bytes:
        return event(answer.body()) + DONE

    def refusal(self, answer: ErrorAnswer) -> dict[str, Any]:
        return answer.body()

    def absorb(self, delta: Delta) -> None:
        self._texts[delta.choice].append(delta.text)
        self._logprobs[delta.choice] += delta.logprobs
        self._finishes[delta.choice] = delta.finish or self._finishes[delta.choice]

    def body(self, served: Served, bill: Bill, asked: Asked) -> dict[str, Any]:
        choices: list[dict[str, Any]] = [
            {
                "index": number,
                "text": "".join(texts),
                "logprobs": self._whole_logprobs(number, served),
                "finish_reason": self._finishes[number],
            }
            for number, texts in enumerate(self._texts)
        ]
        if self._prompt_logprobs:
            for number, choice in enumerate(choices):
                shown = served.prompt_logprobs[number // self._job.params.n]
                choice["prompt_logprobs"] = prompt_logprobs(self._job.model.tokenizer, shown)
        return self._head | {"choices": choices} | self._closing(served, bill, asked)

    def _closing(self, served: Served, bill: Bill, asked: Asked) -> dict[str, Any]:
        return tier_answered(self._job, bill) | closing(served, bill, asked)

    def _logprobs_of(self, delta: Delta) -> dict[str, Any] | None:
        """The delta's logprobs; advances the choice's text offset."""
        if self._job.params.logprobs is None or not delta.logprobs:
            return None
        tokenizer, decoder = self._job.model.tokenizer, self._decoders[delta.choice]
        state, offset = decoder.getstate(), self._offsets[delta.choice]
        shown = text_logprobs(tokenizer, delta.logprobs, offset, decoder=decoder)
        decoder.setstate(state)
        ended = (text_of(tokenizer, each.token, decoder) for each in delta.logprobs)
        self._offsets[delta.choice] += sum(map(len, ended))
        return shown

    def _whole_logprobs(self, number: int, served: Served) -> dict[str, Any] | None:
        """The logprobs of the answer's tokens, after the prompt's if `echo` is set."""
        if self._job.params.logprobs is None:
            return None
        tokenizer, answer = self._job.model.tokenizer, self._logprobs[number]
        if not self._echoes[number]:
            return text_logprobs(tokenizer, answer, self._offsets[number])
        prompt = number // self._job.params.n
        whole = [*served.prompt_logprobs[prompt], *answer]
        return text_logprobs(tokenizer, whole, 0, first=self._job.prompts[prompt][0])

    def _chunk(
        self, number: int, text: str, shown: dict[str, Any] | None, finish: FinishReason | None
    ) -> dict[str, Any]:
        choice = {"index": number, "text": text, "logprobs": shown, "finish_reason": finish}
        chunk = self._head | {"choices": [choice]}
        if self._usage_follows:
            chunk["usage"] = None
        return chunk
