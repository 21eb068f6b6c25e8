"""Each way to miss is told in its own words, with the token, the tier and the time."""

import pytest

from api.journal.why import MissFinding, ReasonKind, why
from engine.request import BlockRun, Lookup
from tiers.blocks.keys import PrefixKey
from tiers.errors import MissReason
from tiers.telemetry.misses import Absence, Departure
from tiers.tier import Cause, TierName

PARENT, KEY, OTHER = (PrefixKey(bytes([n]) * 16) for n in (1, 2, 3))
NOW = 1_000_000.0


def lookup(served, prompt, absence=None, stop=MissReason.ABSENT):
    runs = [BlockRun(TierName.DISK, 0, served, served // 64, PARENT)] if served else []
    runs.append(BlockRun(None, served, prompt - served, 1))
    return Lookup(tuple(runs), stop, 64, absence)


def missing(**known):
    return Absence(parent=PARENT, key=known.pop("key", KEY), **known)  # type: ignore[arg-type]


def left(tier, cause, seconds):
    return lookup(64, 200, missing(departure=Departure(tier, cause, NOW - seconds)))


# What a lookup told, what was found of the miss, the kind of the reason, and of its words.
REASONS = [
    (lookup(128, 129), {}, "SERVED", "Everything before the last token was served"),
    (lookup(0, 99, stop=MissReason.DISABLED), {}, "DISABLED", "asked for no cache"),
    (lookup(0, 99, missing(), MissReason.UNREPORTED), {}, "UNREPORTED", "did not say how much"),
    (lookup(0, 99, missing()), {}, "NEVER_SEEN", "begins as none before it"),
    (lookup(64, 200, missing()), {}, "NEVER_SEEN", "Block 1 (tokens 64 to 127)"),
    (
        *(left(TierName.DISK, Cause.ROOM, 180), {}, "LEFT"),
        "evicted from the disk tier for room 3 min before this request",
    ),
    (left(TierName.HOST, Cause.REQUEST, 4), {}, "LEFT", "purged from the host tier 4 s before"),
    (
        *(lookup(75, 200, missing(rows=11, parted=True, sibling=OTHER)), {}, "DIVERGED"),
        "at token 75. The 75 tokens before it are cached",
    ),
    (
        *(lookup(64, 200, missing()), {"rows": 11, "sibling": "03"}, "DIVERGED"),
        "Tokens 64 to 74 are cached in a block",
    ),
    (lookup(75, 200, missing(rows=11)), {}, "ENDED", "ends at token 75"),
    (lookup(0, 99, missing()), {"owners": ("tenant acme",)}, "OTHER_SCOPE", "but for tenant acme"),
    (lookup(64, 90, missing(key=None)), {}, "TAIL", "last 26 tokens do not fill"),
    (
        *(lookup(64, 200, missing(), MissReason.SLOWER_THAN_COMPUTE), {}, "REFUSED"),
        "longer than computing it",
    ),
    (
        *(lookup(64, 200, missing(), MissReason.CHECKSUM), {}, "FAULT"),
        "not those that were written",
    ),
]


@pytest.mark.parametrize(("told", "found", "kind", "words"), REASONS)
def test_every_reason_has_its_words(told, found, kind, words):
    reason = why(told, NOW, MissFinding(**found))
    assert ReasonKind[kind] is reason.kind
    assert words in reason.text
    assert told.runs[-1].start == reason.token


def test_every_cause_of_leaving_has_words():
    for cause in Cause:
        gone = missing(departure=Departure(TierName.DISK, cause, NOW - 60))
        assert "60 s before this request" in why(lookup(64, 200, gone), NOW).text


def test_every_stop_of_a_lookup_has_words():
    for stop in MissReason:
        assert why(lookup(64, 200, missing(), stop), NOW).text.endswith((".", "?"))
