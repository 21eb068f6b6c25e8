"""The engine's limits, and what it must know of its model."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from engine.request import SamplingParams
from engine.scheduling.settings import SchedulerSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """The engine's limits, and what it must know of its model."""

    scheduler: SchedulerSettings = field(default_factory=SchedulerSettings)
    max_waiting: int = 1024
    max_context: int = 1 << 20
    eos_token_ids: frozenset[int] = frozenset()
    adapters: Mapping[str, bytes] = field(default_factory=dict)  # digest by name; may change
    jump_forward: bool = True  # compute tokens forced by a grammar in one step
    check_params: Callable[[SamplingParams], None] = lambda params: None  # raises InvalidParameter
