"""The billing policy in code: each outcome of a request, and the part of its usage that is billed.

`docs/billing.md` says the same in words; `tests/unit/test_billing_policy.py` tests each line.
"""

from enum import StrEnum

from billing.usage import EMPTY, Usage


class Outcome(StrEnum):
    """How a request ended. Every reserved request is settled with exactly one outcome."""

    FINISHED = "finished"  # the answer is complete
    BUDGET = "budget"  # a top-up of the hold failed; the answer ends with finish_reason `length`
    CLIENT_GONE = "client_gone"  # the client disconnected; work stopped at the abort
    FAILED = "failed"  # the server failed
    CRASHED = "crashed"  # the server died; settled from the hold at the next start
    LAPSED = "lapsed"  # the lease of its hold ended


# Settled by the ledger alone, from the last recorded progress; a later settlement by the server
# wins.
PRESUMED = frozenset({Outcome.CRASHED, Outcome.LAPSED})


def billable(usage: Usage, outcome: Outcome, *, delivered: bool = True) -> Usage:
    """The part of `usage` that is billed for this outcome.

    `delivered` is False only if no byte of the answer reached the client.
    """
    if outcome in (Outcome.FINISHED, Outcome.BUDGET, Outcome.CLIENT_GONE):
        return usage
    return usage if usage.output and delivered else EMPTY  # it failed before anything was sent
