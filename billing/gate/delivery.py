"""Answers that never arrived: a delivered retry pays instead of them, not in addition. Pure.

A charge whose answer was lost is remembered by its request's fingerprint. It is refunded when the
retry is settled, whichever of the two is settled first.
"""

from collections.abc import Iterable

from billing.gate.commands import Correct, Settle
from billing.gate.corrections import cost_of, give_back
from billing.gate.entries import Entry
from billing.gate.holds import answered, decode_request
from billing.gate.outcomes import PRESUMED
from billing.gate.work import SYSTEM, Work


def note_delivery(work: Work, command: Settle, entry: Entry, *, answered: bool = False) -> None:
    """Notes whether the answer of a charge arrived. `answered`: its retry has been delivered."""
    context = command.hold.context
    if not context.fingerprint or command.outcome in PRESUMED:
        return
    key = (entry.tenant, context.fingerprint)
    if command.delivered and context.is_retry:
        _forgive(work, [other for other in work.undelivered.pop(key, ()) if other != entry])
        work.put_undelivered = {row for row in work.put_undelivered if row[0] != key}
        work.dropped_undelivered.add(key)
        _tell_running(work, key)
    elif not command.delivered and answered:
        _forgive(work, [entry])
    elif not command.delivered and cost_of(work, entry):
        work.put_undelivered.add((key, entry.request_id))
        work.undelivered.setdefault(key, []).append(entry)  # a retry may be in the same batch


def _forgive(work: Work, lost: Iterable[Entry]) -> None:
    """Refunds charges of lost answers whose retry was delivered."""
    reason = "the answer was not delivered, and its retry was"
    for entry in lost:
        if cost_of(work, entry):  # else it was free or already refunded by an admin
            reference = f"retry:{entry.request_id}"
            command = Correct(entry.tenant, entry.request_id, reference, None, SYSTEM, reason)
            give_back(work, entry, command)


def _tell_running(work: Work, fingerprint: tuple[str, str]) -> None:
    """Marks running requests whose retry has been delivered."""
    for hold in list(work.holds.values()):
        if (hold.tenant, decode_request(hold.body)[1].fingerprint) == fingerprint:
            work.put_hold(answered(hold))
