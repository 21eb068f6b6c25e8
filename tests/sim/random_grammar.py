"""A grammar drawn by a seed, for engines in simulated time: it allows, forces and ends."""

import random
from collections import deque
from collections.abc import Sequence

import numpy as np

EOS = 50  # beyond the tokens that the model chooses by itself; a grammar may allow it


class RandomGrammar:
    """Allows and forces tokens by a seed and the tokens before; `engine.structure.Grammar`.

    A `slow` one's states are often not ready when they are first asked.
    """

    def __init__(self, seed: int, *, slow: bool = False) -> None:
        self.seed = seed
        self.slow = slow

    def begin(self, min_tokens: int) -> "RandomState":
        return RandomState(self.seed, slow=self.slow)


class RandomState:
    """A run of forced tokens, or a choice that may include the end, then the next."""

    def __init__(self, seed: int, *, slow: bool = False) -> None:
        self.slow = slow
        self.forced: deque[int] = deque()
        self.stuck: str | None = None
        self._taken = [seed]
        self._patience = 0  # how often it is asked before it is ready
        self._look_ahead()

    @property
    def ready(self) -> bool:
        self._patience -= 1
        return self._patience < 0

    def wait(self, timeout_s: float) -> bool:
        return self.ready

    @property
    def allowed(self) -> np.ndarray:
        return _mask([self.forced[0]] if self.forced else self._choice)

    def accept(self, token: int) -> None:
        if self.forced:
            assert token == self.forced.popleft()
        else:
            assert token in self._choice
        self._taken.append(token)
        if not self.forced:
            self._look_ahead()

    def _look_ahead(self) -> None:
        chance = random.Random(repr(self._taken))
        self._patience = chance.choice((0, 0, 1, 3)) if self.slow else 0
        self._choice = chance.sample(range(50), 3) + [EOS] * (chance.random() < 0.1)
        if chance.random() < 0.4:
            self.forced += [chance.randrange(50) for _ in range(chance.randrange(1, 12))]


def _mask(tokens: Sequence[int]) -> np.ndarray:
    bits = np.zeros(64, dtype=np.bool_)
    bits[list(tokens)] = True
    return np.packbits(bits, bitorder="little").view(np.int32)
