"""What a run found, as text and JSON."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from cachesvc.conform.question import Check
from cachesvc.conform.suite import CONTROLS, OTHER_DTYPE

_SHOWN = 20  # flips that a report lists in full


@dataclass
class Report:
    """Checks by kind. A flip is an answer whose tokens differ from the cold one's. Prompts may
    begin alike by chance, but not for a whole `block`."""

    block: int = 1
    cases: Counter[str] = field(default_factory=Counter)
    flips: Counter[str] = field(default_factory=Counter)
    moves: Counter[str] = field(default_factory=Counter)  # equal tokens, other log-probabilities
    moved: float = 0.0  # the largest change of a log-probability
    num_compared: int = 0  # checks with log-probabilities
    served: Counter[str] = field(default_factory=Counter)  # prompt tokens by tier
    cached: int = 0  # prompt tokens that the server says it had
    num_counting: int = 0  # checks whose usage says that number
    foreign: int = 0  # tokens served that a server with another dtype had computed
    cold_cached: int = 0  # tokens of cold answers that came from a cache
    ended: str | None = None  # why the run ended before its end
    shown: list[Check] = field(default_factory=list)
    shown_moves: list[Check] = field(default_factory=list)

    def add(self, check: Check) -> None:
        self.cases[check.kind] += 1
        self.num_compared += check.moved is not None
        if check.moved and check.at is None:
            self.moves[check.kind] += 1
            if len(self.shown_moves) < _SHOWN:
                self.shown_moves.append(check)
        self.moved = max(self.moved, check.moved or 0.0)
        self.cached += check.given.cached or 0
        self.num_counting += check.given.cached is not None
        if check.kind in CONTROLS:
            self.cold_cached += check.given.cached or 0
        num_cached = check.given.cached or 0
        if check.kind == OTHER_DTYPE and self.cases[check.kind] == 1 and num_cached >= self.block:
            self.foreign += num_cached  # what is asked later hits this one
        self.served.update({tier: num for tier, num in check.given.tiers.items() if num})
        if check.at is not None:
            self.flips[check.kind] += 1
            if len(self.shown) < _SHOWN:
                self.shown.append(check)

    @property
    def num_flips(self) -> int:
        return self.flips.total()

    def faults(self, *, bits: bool, tiers: Iterable[str] = ()) -> list[str]:
        """Why the run does not conform, in sentences; empty if it does. `tiers` had to serve."""
        said = [f"the run ended early: {self.ended}"] if self.ended is not None else []
        if self.num_flips:
            total = self.cases.total()
            said.append(f"{self.num_flips} of {total} answers differ from the cold one")
        controls = sum(self.flips[kind] for kind in CONTROLS)
        if controls:
            said.append(f"{controls} of these read no cache: the server does not repeat itself")
        if self.cold_cached:
            said.append(f"{self.cold_cached} tokens of cold answers came from a cache")
        if self.foreign:
            said.append(f"{self.foreign} tokens were served that another dtype had computed")
        if self.num_counting and not self.cached:
            said.append("no answer says that its prompt was cached: is the cache on?")
        if bits and not self.num_compared:
            said.append("the server serves no log-probabilities, so bits cannot be compared")
        if bits and self.moves.total():
            said.append(f"log-probabilities moved in {self.moves.total()} further answers")
        unproved = [tier for tier in tiers if not self.served[tier]]
        said += [
            f"no token was served from the {tier} tier: ask more cases, or make the tiers smaller "
            "with CACHESVC_CACHE__DEVICE_BYTES and the like"
            for tier in unproved
        ]
        if not self.cases:
            said.append("nothing was compared")
        return said

    def as_json(self) -> dict[str, Any]:
        return {
            "cases": self.cases.total(),
            "flips": self.num_flips,
            "moves": self.moves.total(),
            "largest_move": self.moved if self.num_compared else None,
            "cached_tokens": self.cached if self.num_counting else None,
            "tiers": dict(self.served),
            "kinds": {
                kind: {"cases": num, "flips": self.flips[kind], "moves": self.moves[kind]}
                for kind, num in self.cases.items()
            },
            "first_flips": [check.as_json() for check in self.shown],
            "first_moves": [check.as_json() for check in self.shown_moves],
        }

    def flip_lines(self) -> list[str]:
        """A sentence for each flip that is shown."""
        return [
            f"{check.kind}, a prompt of {len(check.question.prompt)}: token {check.at} is "
            f"{shown['given']!r}, cold {shown['expected']!r}"
            for check in self.shown
            for shown in [check.as_json()]
        ]
