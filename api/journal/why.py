"""Why a prompt's tokens were computed rather than served, in sentences. Pure.

`why` reads a request's lookup and an optional `MissFinding` made later. A finding may mention other
tenants, so it is for admins only. The first sentence is the reason; the rest says what to do about
it.
"""

from dataclasses import dataclass
from enum import StrEnum

from api.format import seconds
from engine.request import BlockRun, Lookup
from tiers.errors import MissReason
from tiers.telemetry.misses import MAX_EVICTED_KEYS, Absence, Departure
from tiers.tier import Cause


class ReasonKind(StrEnum):
    """The kind of reason: a closed set for pages and programs."""

    SERVED = "served"  # all but the last token was a hit
    NEVER_SEEN = "never_seen"
    LEFT = "left"  # it was cached, then evicted or purged
    DIVERGED = "diverged"  # a cached prompt has the same beginning and another continuation
    ENDED = "ended"  # the cached prefix ends there
    OTHER_SCOPE = "other_scope"  # cached for another tenant, model or adapter
    TAIL = "tail"  # the rest does not fill a block
    REFUSED = "refused"  # it is cached and was not loaded
    FAULT = "fault"  # it is cached and could not be read
    DISABLED = "disabled"
    UNREPORTED = "unreported"  # an engine elsewhere did not say what was cached
    OTHER_ARITHMETIC = "other_arithmetic"  # cached, but computed by another processor or torch


@dataclass(frozen=True, slots=True)
class Why:
    """One prompt's reason. `token` is the first computed token."""

    kind: ReasonKind
    token: int
    text: str


@dataclass(frozen=True, slots=True)
class MissFinding:
    """The result of searching all tiers afterwards.

    `rows` leading tokens of the missed block are in `sibling`, on disk. `owners` hold the missed
    block itself under other scopes.
    """

    rows: int = 0
    sibling: str | None = None
    owners: tuple[str, ...] = ()


NOTHING = MissFinding()

REFUSALS = {
    MissReason.SLOWER_THAN_COMPUTE: "It is on disk or in the remote tier, but at the rates "
    "measured then loading it would have taken longer than computing it.",
    MissReason.OVERLOADED: "It is on disk, but the queue of loads was full, so it was computed "
    "instead. A faster disk helps.",
    MissReason.NO_ROOM: "It is on disk, but no host frame was free to load it into. A larger "
    "`cache.host_bytes` helps.",
}
FAULTS = {
    MissReason.COLLISION: "a block of another prefix has the same key; it was not used",
    MissReason.CHECKSUM: "its bytes on disk are not those that were written",
    MissReason.TORN: "its record on disk is shorter or longer than it says",
    MissReason.VERSION: "it was written in another record format",
    MissReason.LAYOUT: "it was written for another block layout",
    MissReason.IO_ERROR: "the operating system refused to read it",
    MissReason.DECODE: "it does not decompress",
    MissReason.COPY: "the device refused to copy it",
}


def why(lookup: Lookup, arrived_s: float, finding: MissFinding = NOTHING) -> Why:
    """Why the tokens of the lookup's last run were computed."""
    computed = lookup.runs[-1]
    kind, text = _reason(lookup, computed, arrived_s, finding)
    return Why(kind, computed.start, text)


def _reason(
    lookup: Lookup, computed: BlockRun, arrived_s: float, finding: MissFinding
) -> tuple[ReasonKind, str]:
    stop, absence = lookup.stop, lookup.absence
    if stop is MissReason.DISABLED:
        return ReasonKind.DISABLED, "The request asked for no cache, so all of it was computed."
    if stop is MissReason.UNREPORTED:
        return ReasonKind.UNREPORTED, (
            "The engine did not say how much of the prompt it had cached, or said what cannot be: "
            "all of it counts as computed. A request that is cut off ends without that count."
        )
    if absence is None:
        return ReasonKind.SERVED, (
            "Everything before the last token was served. The last token of a prompt is always "
            "computed: the answer begins with what it predicts."
        )
    block = f"Block {computed.start // lookup.block_size}"
    if stop is MissReason.ARITHMETIC:
        return ReasonKind.OTHER_ARITHMETIC, (
            "The prompt is cached, but was computed by another processor, device or version of "
            "torch, whose numbers differ in their last bits. It was computed again, so that a hit "
            "never changes an answer."
        )
    if stop in REFUSALS:
        return ReasonKind.REFUSED, f"{block} was not loaded. {REFUSALS[stop]}"
    if stop in FAULTS:
        return ReasonKind.FAULT, (
            f"{block} could not be served: {FAULTS[stop]}. It was computed again, and the fault is "
            "counted."
        )
    return _absent(lookup, absence, arrived_s, finding)


def _absent(
    lookup: Lookup, absence: Absence, arrived_s: float, finding: MissFinding
) -> tuple[ReasonKind, str]:
    size, start = lookup.block_size, lookup.runs[-1].start
    number = start // size
    first = number * size
    block = f"Block {number} (tokens {first} to {first + size - 1})"
    if absence.departure is not None:
        return ReasonKind.LEFT, _left(block, absence.departure, arrived_s)
    rows = max(absence.rows, finding.rows)
    if rows and (absence.parted or finding.rows > absence.rows):
        return ReasonKind.DIVERGED, _parted(first + rows, start)
    if rows:
        return ReasonKind.ENDED, (
            f"What is cached of this prompt ends at token {first + rows}: no prompt before went on "
            "as this one does."
        )
    if absence.key is None:
        left = lookup.runs[-1].num_tokens
        return ReasonKind.TAIL, (
            f"The last {left} tokens do not fill a block of {size}. A partly filled block is "
            "served again only while it is in memory, and no other prompt ended this way."
        )
    if finding.owners:
        owners = ", ".join(finding.owners)
        return ReasonKind.OTHER_SCOPE, (
            f"{block} is cached, but for {owners}: tenants, models and adapters share nothing "
            "unless a sharing group lets them."
        )
    what = "The prompt begins as none before it" if not first else f"{block} was never seen"
    return ReasonKind.NEVER_SEEN, (
        f"{what}: no tier holds it, and it is not among the last {MAX_EVICTED_KEYS:,} blocks that "
        "left the cache since the server started."
    )


def _left(block: str, departure: Departure, arrived_s: float) -> str:
    ago = seconds(max(0.0, arrived_s - departure.at_s))
    tier = departure.tier
    match departure.cause:
        case Cause.ROOM:
            return (
                f"{block} was evicted from the {tier} tier for room {ago} before this request, and "
                f"no other tier held it. A larger {tier} tier, or a pin, would have kept it."
            )
        case Cause.AGE:
            return (
                f"{block} was dropped from the {tier} tier {ago} before this request: nobody had "
                "used it for as long as `cache.idle_ttl` allows."
            )
        case Cause.REQUEST:
            return f"{block} was purged from the {tier} tier {ago} before this request."
        case _:
            return f"{block} left the {tier} tier {ago} before this request ({departure.cause})."


def _parted(divergence: int, start: int) -> str:
    text = (
        f"The prompt diverges from every cached one at token {divergence}. The {divergence} tokens "
        "before it are cached."
    )
    if start < divergence:
        text += (
            f" Tokens {start} to {divergence - 1} are cached in a block that continues "
            "differently. From disk, only whole blocks are loaded."
        )
    if divergence < 256:
        text += " Is there a date, an id or a name near the beginning of the prompt?"
    return text
