"""Log-probabilities in OpenAI's two shapes: by token for chat, by column for text."""

import codecs
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from engine.request import TokenLogprob

if TYPE_CHECKING:
    from engine.text.tokenizer import Tokenizer

FLOOR = -9999.0  # OpenAI's value for an impossible token; JSON has no infinity


def chat_logprobs(tokenizer: "Tokenizer", tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
    """`choices[].logprobs` of a chat answer."""
    content = [
        {
            **_entry(tokenizer, each.token, each.logprob),
            "top_logprobs": [_entry(tokenizer, token, value) for token, value in each.top],
        }
        for each in tokens
    ]
    return {"content": content, "refusal": None}


class TextLogprobs:
    """`choices[].logprobs` of a completion, in columns, for its tokens in order."""

    def __init__(self, tokenizer: "Tokenizer") -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._offset = 0  # where the next token's text begins

    def columns(
        self, tokens: Sequence[TokenLogprob], *, first: int | None = None
    ) -> dict[str, Any]:
        """The next tokens'. `first` is an echoed prompt's first, which has no probability."""
        name, told = partial(_name, self._tokenizer), first is not None
        ids = [*([first] if first is not None else []), *(each.token for each in tokens)]
        tops = [{name(token): _finite(value) for token, value in each.top} for each in tokens]
        return {
            "tokens": [name(token) for token in ids],
            "token_logprobs": [None] * told + [_finite(each.logprob) for each in tokens],
            "top_logprobs": [None] * told + tops,
            "text_offset": [self._begin(token) for token in ids],
        }

    def _begin(self, token: int) -> int:
        """Where a token's text begins. Tokens within one character begin where that does; special
        tokens are not in the text."""
        begun = self._offset
        if token not in self._tokenizer.special_token_ids:
            self._offset += len(self._decoder.decode(self._tokenizer.token_bytes(token)))
        return begun


def _entry(tokenizer: "Tokenizer", token: int, logprob: float) -> dict[str, Any]:
    raw = list(tokenizer.token_bytes(token))
    return {"token": _name(tokenizer, token), "logprob": _finite(logprob), "bytes": raw}


def _name(tokenizer: "Tokenizer", token: int) -> str:
    return tokenizer.token_bytes(token).decode("utf-8", errors="replace")


def _finite(logprob: float) -> float:
    return max(logprob, FLOOR)
