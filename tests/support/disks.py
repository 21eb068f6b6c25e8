"""Disk tiers that are closed when their test ends, by a fixture of the unit tests."""

from tiers.disk.tier import DiskTier

_OPEN: list[DiskTier] = []


def closed_later(tier: DiskTier) -> DiskTier:
    _OPEN.append(tier)
    return tier


def close_all() -> None:
    while _OPEN:
        _OPEN.pop().close()
