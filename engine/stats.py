"""What an engine tells of itself to who watches it. No torch here."""

from dataclasses import dataclass

from tiers.stats import CacheStats


@dataclass(frozen=True, slots=True)
class EngineUse:
    """How an engine at a URL does. Tokens are of prompts that it completed; `errors` are
    requests."""

    url: str
    is_up: bool
    num_in_flight: int
    prompt_tokens: int
    hit_tokens: int
    errors: int
    model: str = ""  # that clients name
    is_refused: bool = False  # what answers is not what it should be


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot of the engine, taken between steps."""

    num_running: int
    num_waiting: int
    num_loading: int
    num_preemptions: int
    num_steps: int
    prompt_tokens_computed: int
    jumped_tokens: int  # forced by a grammar, each saving a decode step
    cache: CacheStats
    failed: str | None = None
    engines: tuple[EngineUse, ...] = ()  # those elsewhere that compute

    @property
    def are_away(self) -> bool:
        """No engine answers."""
        return bool(self.engines) and not any(each.is_up for each in self.engines)
