"""Clients of a live server: what they ask, and what they were told of tokens and cost."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

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
    return {
        "model": MODEL,
        "messages": [{"role": "user", "content": text}],
        "max_tokens": dice.randrange(1, max_tokens),
        "temperature": 0,
        "ignore_eos": True,
        "stream": stream,
        **({"stream_options": {"include_usage": True}} if stream else {}),
    }


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
