"""Where engine and money meet: a charge is opened before work and settled on every way out.

A `Charge` is the money side of one client request. It opens with a hold, covers output in slices
while the answer is decoded, and ends exactly once, whatever way the request leaves.
"""

from typing import Protocol

from api.auth import Caller
from api.generation import Job, Served
from api.usage import Bill


class Charge(Protocol):
    """One request's money. `settle` may be called again and then returns the same bill."""

    async def cover(self, output_tokens: int) -> int:
        """How many output tokens are paid for, at most `output_tokens` of them."""
        ...

    async def settle(self, served: Served, *, delivered: bool) -> Bill:
        """Posts what `served` costs and releases the rest; durable when it returns.

        `delivered` is False only where no byte of the answer reached the client.
        """
        ...

    async def void(self) -> None:
        """Releases the hold; nothing was served."""
        ...


class Meter(Protocol):
    """Opens charges. Raises what `api.errors` maps to 402 when the balance does not cover one."""

    async def admit(self, caller: Caller, job: Job) -> Charge: ...
