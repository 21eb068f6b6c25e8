"""Rates and concurrency per key and tenant (grows below; the open server has none)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from api.auth import Caller
from billing.usage import Usage


class Permit(Protocol):
    """One admitted request's place; `headers` go out with its answer."""

    @property
    def headers(self) -> Mapping[str, str]: ...

    async def close(self, usage: Usage) -> None:
        """Gives the place back and books what was really used. Called once."""
        ...


class RateLimits(Protocol):
    """Raises RateLimited, or lets the request in."""

    async def admit(self, caller: Caller, prompt_tokens: int, max_output_tokens: int) -> Permit: ...


@dataclass(frozen=True, slots=True)
class FreePass:
    """The permit of a server without limits."""

    headers: Mapping[str, str]

    async def close(self, usage: Usage) -> None:
        """Nothing was taken."""


class NoLimits:
    """A server without limits."""

    async def admit(self, caller: Caller, prompt_tokens: int, max_output_tokens: int) -> Permit:
        return FreePass({})
