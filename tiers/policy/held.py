"""Held blocks of a queue policy: skipped when met, then put back where the policy says.

A queue that met a held block at its end takes it out (parks it), so that a victim is found in O(1)
amortised steps however many blocks are held.
"""

from typing import Generic

from tiers.policy.policy import K


class HeldSet(Generic[K]):
    """Which blocks are held, and which of these the queue has parked."""

    __slots__ = ("_parked",)

    def __init__(self) -> None:
        self._parked: dict[K, bool] = {}  # held key -> parked

    def __contains__(self, key: K) -> bool:
        return key in self._parked

    def hold(self, key: K) -> None:
        self._parked[key] = False

    def park(self, key: K) -> None:
        """The queue no longer has this held key."""
        self._parked[key] = True

    def release(self, key: K) -> bool:
        """Whether the key was parked, so that the queue must take it back."""
        return self._parked.pop(key)

    def discard(self, key: K) -> None:
        self._parked.pop(key, None)
