"""/admin/api/ledger: what the server alone can say.

Reading a proof is cheap; making one reads every entry.
"""

from typing import Any

from fastapi import APIRouter

from api.admin.access import Books
from billing.proof.prover import Proved
from billing.reports.documents import Document, proof_document
from billing.reports.heads import heads_document, heads_of
from billing.store import reports as store_reports

router = APIRouter(prefix="/admin/api")


@router.get("/ledger", tags=["admin: ledger"])
def ledger(books: Books) -> Document:
    """The ledger's size, its thread's counters and its last proof."""
    with books.store.reading() as connection:
        num_entries = store_reports.num_entries(connection)
        num_holds = len(store_reports.hold_list(connection))
    stats = books.ledger.stats()
    return {
        "entries": num_entries,
        "holds": num_holds,
        "commands": stats.commands,
        "refused": stats.refused,
        "settled": stats.settled,
        "lapsed": stats.swept,
        "crashed": stats.recovered,
        "failed_commits": stats.failed_batches,
        "waiting": stats.queued,
        "proof": _proved(books.prover.last),
    }


@router.post("/ledger/verify", tags=["admin: ledger"])
def verify(books: Books) -> Document | None:
    """Prove the whole ledger now; `ok` is false if anything differs. Changes nothing."""
    return _proved(books.prover.prove())


@router.get("/ledger/heads", tags=["admin: ledger"])
def heads(books: Books) -> Document:
    """The last hash of each tenant and of the admin trail, to store where nobody can change it."""
    return heads_document(heads_of(books.store))


def _proved(proved: Proved | None) -> Document | None:
    if proved is None:
        return None
    document: dict[str, Any] = proof_document(proved.proof, proved.took_s)
    return document | {"at_ns": proved.at_ns}
