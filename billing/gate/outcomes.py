"""The written policy in code: each way out of a request, and what of its usage is billed.

`docs/billing.md` says the same in words; `tests/unit/test_billing_policy.py` holds each line.
"""

from enum import StrEnum

from billing.usage import EMPTY, Usage


class Outcome(StrEnum):
    """How a request ended. Every request that was reserved is settled with exactly one."""

    FINISHED = "finished"  # the answer is complete
    BUDGET = "budget"  # a top-up failed; the answer ends early with finish_reason `length`
    CLIENT_GONE = "client_gone"  # the client went away; work stopped at the abort
    FAILED = "failed"  # the server failed
    CRASHED = "crashed"  # the server died; settled from the journal at the next start
    LAPSED = "lapsed"  # nobody renewed its hold's lease


# Settled by the ledger alone, from the last recorded progress; a later word of the server wins.
PRESUMED = frozenset({Outcome.CRASHED, Outcome.LAPSED})


def billable(usage: Usage, outcome: Outcome, *, delivered: bool = True) -> Usage:
    """The part of `usage` that is billed when a request ends so.

    `delivered` is False only if no byte of the answer reached the client.
    """
    if outcome in (Outcome.FINISHED, Outcome.BUDGET, Outcome.CLIENT_GONE):
        return usage
    return usage if usage.output and delivered else EMPTY  # failed before anything was sent
