"""Early refusal: a request that would wait too long gets a 503 at once, with Retry-After.

A server with an unbounded queue answers everybody late. Under overload each answer comes after its
client has given up, and the work is lost. The engine predicts the wait of a tenant's next request
from the tenant's queue, its fair share and the recent rate. Event loop only.
"""

import math
from collections.abc import Sequence
from typing import Final

from api.access.shares import Shares
from api.errors import Overloaded, QueueTooLong
from api.served_model import EngineClient
from engine.scheduling.shares import owner_of

MAX_RETRY_S: Final = 60  # OpenAI's clients ignore a longer Retry-After


class QueueBound:
    """Limits who may queue: by the predicted wait, and by the places of a tenant or its user.

    Invariant: at most `max_in_flight` admitted prompts have not been given back.
    """

    def __init__(
        self, engine: EngineClient, *, max_wait_s: float = 10.0, max_in_flight: int = 1024
    ) -> None:
        self._engine = engine
        self._max_wait_s = max_wait_s
        self._places = Shares(max_in_flight)

    def wait_s(self, share: str, num_tokens: int = 0) -> float:
        """How long a prompt of `num_tokens` would wait to begin."""
        return self._engine.predicted_wait_s(share, num_tokens)

    def check_wait(self, share: str, num_tokens: int = 0) -> None:
        """Raises QueueTooLong if a prompt of `num_tokens` would wait longer than is allowed.

        It is called without tokens before the body is read, so that a refusal costs almost nothing.
        """
        wait_s, bound_s = self.wait_s(share, num_tokens), self._max_wait_s
        if wait_s <= bound_s:
            return
        retry_s = min(MAX_RETRY_S, max(1, math.ceil(wait_s - bound_s)))
        raise QueueTooLong(
            f"The server is busy: this request would wait about {wait_s:.0f} s to begin, and at "
            f"most {bound_s:g} s are allowed (engine.max_wait). Retry in {retry_s} s.",
            headers={"Retry-After": str(retry_s)},
        )

    def enter(self, share: str, num_prompts: int) -> None:
        """Takes a place for each prompt until `leave`. Raises Overloaded."""
        if not self._places.take(share, num_prompts):
            whose = "tenant" if share == owner_of(share) else "user"
            raise Overloaded(
                f"{self._places.used} prompts are in flight, {self._places.held(share)} of them "
                f"of this {whose}, as many as are allowed (engine.max_waiting); retry shortly."
            )

    def leave(self, share: str, num_prompts: int) -> None:
        self._places.give_back(share, num_prompts)


def check_any(queues: Sequence[QueueBound], share: str) -> None:
    """Raises QueueTooLong if no engine would begin in time. Called before the body, which names the
    model, is read."""
    first = queues[0] if len(queues) == 1 else min(queues, key=lambda queue: queue.wait_s(share))
    first.check_wait(share)
