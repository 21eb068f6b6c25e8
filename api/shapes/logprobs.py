"""Log-probabilities in OpenAI's two shapes: by token for chat, by column for text."""

import codecs
from collections.abc import Iterator, Sequence
from typing import Any

from api.served_model import Tokenizer
from engine.request import TokenLogprob

FLOOR = -9999.0  # OpenAI's value for an impossible token; JSON has no infinity


def chat_logprobs(tokenizer: Tokenizer, tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
    """`choices[].logprobs` of a chat answer."""
    content = [
        {
            **_entry(tokenizer, each.token, each.logprob),
            "top_logprobs": [_entry(tokenizer, token, value) for token, value in each.top],
        }
        for each in tokens
    ]
    return {"content": content, "refusal": None}


def text_logprobs(
    tokenizer: Tokenizer,
    tokens: Sequence[TokenLogprob],
    offset: int,
    *,
    first: int | None = None,
    decoder: codecs.IncrementalDecoder | None = None,
) -> dict[str, Any]:
    """`choices[].logprobs` of a completion; `offset` is where the first token's text begins.

    `first` is an echoed prompt's first token, which has no probability. `decoder` holds the part of
    a character with which earlier tokens ended.
    """
    names = [_name(tokenizer, each.token) for each in tokens]
    values: list[float | None] = [_finite(each.logprob) for each in tokens]
    tops: list[dict[str, float] | None] = [
        {_name(tokenizer, token): _finite(value) for token, value in each.top} for each in tokens
    ]
    if first is not None:
        names, values, tops = [_name(tokenizer, first), *names], [None, *values], [None, *tops]
    ids = [*(() if first is None else (first,)), *(each.token for each in tokens)]
    return {
        "tokens": names,
        "token_logprobs": values,
        "top_logprobs": tops,
        "text_offset": list(_offsets(tokenizer, ids, decoder or text_decoder(), offset)),
    }


def text_decoder() -> codecs.IncrementalDecoder:
    return codecs.getincrementaldecoder("utf-8")(errors="replace")


def text_of(tokenizer: Tokenizer, token: int, decoder: codecs.IncrementalDecoder) -> str:
    """The characters that a token ends; special tokens are not in the text."""
    special = token in tokenizer.special_token_ids
    return "" if special else decoder.decode(tokenizer.token_bytes(token))


def _offsets(
    tokenizer: Tokenizer, ids: Sequence[int], decoder: codecs.IncrementalDecoder, offset: int
) -> Iterator[int]:
    """Where each token's text begins. Tokens within one character begin where that does."""
    for token in ids:
        yield offset
        offset += len(text_of(tokenizer, token, decoder))


def prompt_logprobs(
    tokenizer: Tokenizer, tokens: Sequence[TokenLogprob]
) -> list[dict[str, Any] | None]:
    """`prompt_logprobs` in vLLM's shape: None for the first token, then by token id."""
    entries: list[dict[str, Any] | None] = [None]
    for each in tokens:
        ranked = [(token, value, rank) for rank, (token, value) in enumerate(each.top, 1)]
        ranked.append((each.token, each.logprob, each.rank))
        entries.append(
            {
                str(token): {
                    "logprob": _finite(value),
                    "rank": rank,
                    "decoded_token": _name(tokenizer, token),
                }
                for token, value, rank in ranked
            }
        )
    return entries


def _entry(tokenizer: Tokenizer, token: int, logprob: float) -> dict[str, Any]:
    raw = tokenizer.token_bytes(token)
    text = raw.decode("utf-8", errors="replace")
    return {"token": text, "logprob": _finite(logprob), "bytes": list(raw)}


def _name(tokenizer: Tokenizer, token: int) -> str:
    return tokenizer.token_bytes(token).decode("utf-8", errors="replace")


def _finite(logprob: float) -> float:
    return max(logprob, FLOOR)
