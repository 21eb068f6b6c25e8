"""What a run found, as JSON and in sentences."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from cachesvc.conform.question import Check
from cachesvc.conform.suite import CONTROLS, KINDS

_SHOWN = 20  # flips that a report lists in full


def summary(checks: Sequence[Check]) -> dict[str, Any]:
    """A flip is an answer whose tokens differ from the cold one's, a move one with equal tokens and
    other log-probabilities. What no answer says is None."""
    kinds = {kind: [each for each in checks if each.kind == kind] for kind in KINDS}
    cached = [each.given.cached for each in checks if each.given.cached is not None]
    tiers: Counter[str] = Counter()
    for each in checks:
        tiers.update(each.given.tiers)
    return {
        **_counts(checks),
        "largest_move": max((e.moved for e in checks if e.moved is not None), default=None),
        "cached_tokens": sum(cached) if cached else None,
        "cold_cached": sum(each.given.cached or 0 for each in checks if each.kind in CONTROLS),
        "tiers": dict(+tiers),
        "kinds": {kind: _counts(found) for kind, found in kinds.items() if found},
        "first_flips": [asdict(each) for each in checks if each.at is not None][:_SHOWN],
    }


def _counts(checks: Sequence[Check]) -> dict[str, int]:
    same = [each for each in checks if each.at is None]
    moves = sum(bool(each.moved) for each in same)
    return {"cases": len(checks), "flips": len(checks) - len(same), "moves": moves}


def faults(told: Mapping[str, Any], *, bits: bool) -> list[str]:
    """Why a run with this summary does not conform; empty if it does."""
    controls = sum(told["kinds"].get(kind, {}).get("flips", 0) for kind in CONTROLS)
    found = {
        f"{told['flips']} of {told['cases']} answers differ from the cold one": told["flips"],
        f"{controls} of these read no cache: the server does not repeat itself": controls,
        f"{told['cold_cached']} tokens of cold answers came from a cache": told["cold_cached"],
        "no answer says that its prompt was cached: is the cache on?": told["cached_tokens"] == 0,
        "the server serves no log-probabilities, so bits cannot be compared": bits
        and told["largest_move"] is None,
        f"log-probabilities moved in {told['moves']} further answers": bits and told["moves"],
        "nothing was compared": not told["cases"],
    }
    return [sentence for sentence, holds in found.items() if holds]
