"""Clients of a live server: what they ask, and what they were told of tokens and cost."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import httpx

from tests.patience import PATIENCE_S

MODEL = "tiny"
DETAILS = {"X-Cachesvc": "details"}
TOPICS = [f"Notes on topic {number}, kept by the archive. " * 4 for number in range(6)]


@dataclass(frozen=True, slots=True)
class Answer:
    """A complete answer: every byte of it came."""

    request_id: str
    cost: Decimal
    usage: Mapping[str, Any]


class Incomplete(Exception):
    """The connection ended before the answer did."""


def question(dice, *, max_tokens=48):
    """A prompt that shares its beginning with others, streamed or not."""
    text = dice.choice(TOPICS) + f"Which is number {dice.randrange(8)}?"
    stream = dice.random() < 0.5
    asked = {"model": MODEL, "messages": [{"role": "user", "content": text}], "stream": stream}
    asked |= {"max_tokens": dice.randrange(1, max_tokens), "temperature": 0, "ignore_eos": True}
    return asked | ({"stream_options": {"include_usage": True}} if stream else {})


async def ask(client, url, body, headers):
    """The whole answer. Raises httpx's errors, or Incomplete."""
    content = json.dumps(body).encode()
    sent = {**headers, **DETAILS, "Content-Type": "application/json"}
    answer = await client.post(f"{url}/v1/chat/completions", content=content, headers=sent)
    answer.raise_for_status()
    return read(answer.text) if body["stream"] else _answer(answer.json())


def read(text):
    """The answer of a stream. Raises Incomplete."""
    if not text.endswith("data: [DONE]\n\n"):
        raise Incomplete
    events = [line.removeprefix("data: ") for line in text.split("\n\n") if "{" in line]
    documents = [json.loads(event) for event in events]
    if any("error" in document for document in documents):
        raise Incomplete(text)
    return _answer(documents[-1])


def _answer(document):
    cost = Decimal(document["cachesvc"]["cost"]["amount"])
    return Answer(document["id"].partition("-")[2], cost, document["usage"])


def completed(url, model, prompt, headers=None, **more):
    """The greedy completion of a prompt of text, as JSON."""
    return completion(url, model, prompt, headers, **more).json()


def completion(url, model, prompt, headers=None, **more):
    body = {"model": model, "prompt": prompt, "max_tokens": 12, "temperature": 0, **more}
    answer = httpx.post(f"{url}/v1/completions", json=body, headers=headers, timeout=PATIENCE_S)
    assert 200 == answer.status_code, answer.text
    return answer


def hits_of(answer):
    """Tokens of the prompt that hit, by tier."""
    return answer["usage"]["prompt_tokens_details"]["cached_tokens_details"]
