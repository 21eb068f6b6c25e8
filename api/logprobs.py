"""Log-probabilities in the two shapes OpenAI gives them: by token for chat, by column for text."""

from collections.abc import Sequence
from typing import Any

from api.collaborators import Tokenizer
from engine.request import TokenLogprob

FLOOR = -9999.0  # what OpenAI writes for a token that cannot be; JSON knows no infinity


def chat_logprobs(tokenizer: Tokenizer, tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
    """`choices[].logprobs` of a chat answer."""
    content = [
        {
            **_entry(tokenizer, told.token, told.logprob),
            "top_logprobs": [_entry(tokenizer, token, value) for token, value in told.top],
        }
        for told in tokens
    ]
    return {"content": content, "refusal": None}


def text_logprobs(
    tokenizer: Tokenizer, tokens: Sequence[TokenLogprob], offset: int
) -> dict[str, Any]:
    """`choices[].logprobs` of a completion; `offset` is where the first token's text begins."""
    names = [_name(tokenizer, told.token) for told in tokens]
    offsets = []
    for name in names:
        offsets.append(offset)
        offset += len(name)
    return {
        "tokens": names,
        "token_logprobs": [_finite(told.logprob) for told in tokens],
        "top_logprobs": [
            {_name(tokenizer, token): _finite(value) for token, value in told.top}
            for told in tokens
        ],
        "text_offset": offsets,
    }


def _entry(tokenizer: Tokenizer, token: int, logprob: float) -> dict[str, Any]:
    raw = tokenizer.token_bytes(token)
    text = raw.decode("utf-8", errors="replace")
    return {"token": text, "logprob": _finite(logprob), "bytes": list(raw)}


def _name(tokenizer: Tokenizer, token: int) -> str:
    return tokenizer.token_bytes(token).decode("utf-8", errors="replace")


def _finite(logprob: float) -> float:
    return max(logprob, FLOOR)
