"""Answers of a grammar without a model: a token by chance wherever there is a choice."""

import random
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from engine.structure import GrammarState


def ids(mask: NDArray[np.int32]) -> list[int]:
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()


def walk(
    state: GrammarState, tokens: Sequence[bytes], chance: random.Random, limit: int = 400
) -> tuple[bytes | None, int]:
    """A finished answer, None if it is longer than `limit`; and how many tokens were forced.

    Tokens that close something are preferred, so that answers come to an end.
    """
    answer, num_forced = b"", 0
    for _ in range(limit):
        assert state.wait(30.0) and state.stuck is None, state.stuck
        allowed = ids(state.allowed)
        if state.forced:
            assert allowed == [state.forced[0]]
            num_forced += 1
        closing = [t for t in allowed if tokens[t] == b"" or tokens[t][:1] in b'"}]']
        token = chance.choice(closing if closing and chance.random() < 0.4 else allowed)
        if not tokens[token]:
            return answer, num_forced
        answer += tokens[token]
        state.accept(token)
    return None, num_forced


def accepts(state: GrammarState, text: bytes) -> bool:
    """Whether a text of single bytes, whose tokens have the same numbers, is a whole answer."""
    for byte in text:
        if state.stuck is not None or byte not in ids(state.allowed):
            return False
        state.accept(byte)
        assert state.wait(10.0)
    return state.stuck is None and any(token >= 256 for token in ids(state.allowed))
