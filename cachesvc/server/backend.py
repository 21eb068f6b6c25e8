"""A server's engine with what is beneath it: our own over its tiers, or one in another process.

It is created stopped. `close` returns the number of blocks not saved. `blocks` and `disk_view` are
None where the blocks are in another process.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeAlias

from engine.request import StepOutput
from tiers.policy.quota import QuotaShares
from tiers.telemetry.events import EventStream

if TYPE_CHECKING:
    from cachesvc.server.vllm.core import CoreElsewhere
    from engine.composition import Core  # torch

Backend: TypeAlias = "Core | CoreElsewhere"
Deliver = Callable[[Sequence[StepOutput]], None]
MakeBackend = Callable[[Deliver, EventStream, QuotaShares | None], Backend]
