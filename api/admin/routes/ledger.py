"""/admin/api/ledger: what the server alone can prove.

Reading a proof is cheap; making one reads every entry.
"""

from typing import Any

from fastapi import APIRouter

from api.admin.access import Books
from billing.proof.prover import Proved
from billing.reports.documents import Document, proof_document
from billing.reports.heads import heads_document, heads_of

router = APIRouter(prefix="/admin/api")


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
