"""Which of a tenant's accounts an amount is taken from or added to.

Pure. The gate posts by these rules and the audit checks by them.
"""

from billing.gate.entries import Kind, Postings
from billing.gate.work import TenantAccount


def pay_in(account: TenantAccount, amount: int) -> dict[str, int]:
    """Postings of a payment, which settles debt first."""
    owed = min(amount, -account.balances["receivable"])
    return {"receivable": owed, "topup": amount - owed}


def spend(account: TenantAccount, amount: int) -> dict[str, int]:
    """Postings of a charge: granted money first, then paid money; the rest is debt."""
    granted = min(amount, max(0, account.balances["granted"]))
    topup = min(amount - granted, max(0, account.balances["topup"]))
    owed = amount - granted - topup
    return {"granted": -granted, "topup": -topup, "receivable": -owed, "revenue": amount}


def refund(account: TenantAccount, taken: Postings, amount: int) -> dict[str, int]:
    """Postings that refund `amount` of what was `taken`: paid money first, then granted.

    Refunded money settles debt before it can be spent again.
    """
    paid = min(amount, taken["topup"] + taken["receivable"])
    return {**pay_in(account, paid), "granted": amount - paid, "revenue": -amount}


def take_back(account: TenantAccount, source: str, amount: int) -> dict[str, int]:
    """Postings that take `amount` from one account as far as it reaches; the rest is debt."""
    left = min(amount, max(0, account.balances[source]))
    return {source: -left, "receivable": left - amount}


def deposited(account: TenantAccount, kind: Kind, gain: int) -> dict[str, int]:
    """Postings of a deposit, withdrawal or chargeback, or of the difference that corrects one."""
    if kind is Kind.GRANT:
        given = {"granted": gain} if gain > 0 else take_back(account, "granted", -gain)
        return {**given, "promotion": -gain}
    paid = pay_in(account, gain) if gain > 0 else take_back(account, "topup", -gain)
    return {**paid, "cash": -gain}
