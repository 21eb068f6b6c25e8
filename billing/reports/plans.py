"""The state of a month's plan: used included tokens, and the charges against the minimum."""

from billing.gate.plans import committing_card, month_of
from billing.money import format_units
from billing.prices.book import PriceBook
from billing.prices.cards import applied_card
from billing.reports.documents import Document
from billing.reports.grants import grant_documents
from billing.reports.limits import limit_documents
from billing.store import accounts as store_accounts
from billing.store import plans as store_plans
from billing.store import reports as store_reports
from billing.store import wallets as store_wallets
from billing.store.store import LedgerStore


def standing(store: LedgerStore, tenant: str, now_ns: int) -> Document:
    """What a tenant can spend besides its balance: its grants, plan and wallets, and its hard
    limits."""
    with store.reading() as connection:
        wallets = store_wallets.wallet_rows(connection, [tenant])
        limits = limit_documents(connection, tenant, now_ns)
    return {
        "grants": grant_documents(store, tenant),
        "plan": plan_document(store, tenant, now_ns),
        "spend_limits": limits,
        "wallets": {code: format_units(n) for (_, code), n in sorted(wallets.items()) if n},
    }


def plan_document(store: LedgerStore, tenant: str, now_ns: int) -> Document:
    """The plan of the current month (UTC) by the card in force; empty if that has none."""
    month = month_of(now_ns)
    with store.reading() as connection:
        rows = store_accounts.card_rows(connection)
        book = PriceBook(tuple(map(applied_card, rows)))
        account = store_reports.all_accounts(connection)[tenant]
        used = store_plans.used_by(connection, [tenant])
        spent = store_plans.spent_in(connection, [(tenant, month)])[tenant, month]
    own = book.in_force(now_ns, account.currency, tenant)
    card = own or book.in_force(now_ns, account.currency)
    if card is None or not (card.included or card.monthly_minimum):
        return {}
    plan: Document = {"month": month, "rate_card": f"{card.name} {card.version}"}
    plan["included"] = [
        {
            "name": item.name,
            "models": item.pattern,
            "classes": list(item.classes),
            "tokens": item.tokens,
            "left": item.tokens - used.get((tenant, month, card.name, item.name), 0),
        }
        for item in card.included
    ]
    if committing_card(book, account, month) is not None:
        plan["minimum"] = format_units(card.monthly_minimum)
        plan["charged"] = format_units(spent)
    return plan
