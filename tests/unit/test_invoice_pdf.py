"""The pages of an invoice as PDF."""

from typing import Any

import pytest

from billing.invoices import pdf
from billing.names import shown_model

pytest.importorskip("fpdf")


def document(num_lines: int, kind: str = "invoice", payment: str = "IBAN DE02") -> dict[str, Any]:
    line = {"model": "small", "rate_card": "card 1", "window": "standard", "label": "Output"}
    line |= {"quantity": 5, "per_million": "1.00", "exact": "0.000005", "amount": "0.00"}
    seller = {"name": "Seller", "address": ["Street"], "email": "", "tax_id": "", "note": ""}
    buyer = {"name": "Buyer", "address": [], "tax_id": "", "reference": "", "note": "Thanks"}
    return {
        "kind": kind,
        "tenant": "acme",
        "currency": "CNY",
        "period": {"first": "2025-01-01", "last": "2025-01-31", "timezone": "UTC"},
        "seller": seller | {"payment": payment},
        "buyer": buyer,
        "lines": [line] * num_lines,
        "adjustments": [],
        "net": "1.00",
        "taxes": [{"name": "VAT", "rate": "19", "base": "1.00", "amount": "0.19"}],
        "total": "1.19",
        "paid_in_advance": "0.00",
        "due": "1.19",
    }


def test_no_page_has_totals_alone() -> None:
    apart = []
    for num_lines in range(1, 70):
        told = document(num_lines)
        apart.append(pdf._drawn(told, "Invoice", "", num_kept=0)[1])
        assert not pdf._drawn(told, "Invoice", "", num_kept=pdf.ROWS_WITH_TOTALS)[1], num_lines
    assert 2 <= sum(apart) < 20
    whole = pdf._drawn(document(apart.index(True) + 1), "Invoice", "", num_kept=0)[0]
    assert bytes(whole.output()) != pdf.invoice_pdf(document(apart.index(True) + 1), "Invoice", "")


def test_a_credit_note_asks_for_no_payment() -> None:
    def made(kind: str, payment: str) -> bytes:
        return pdf.invoice_pdf(document(1, kind, payment), "Title", "")

    assert made("invoice", "IBAN 1") != made("invoice", "IBAN 2")
    assert made("credit_note", "IBAN 1") == made("credit_note", "IBAN 2")


@pytest.mark.parametrize(
    ("model", "shown"),
    [
        ("small", "small"),
        ("org/name", "org/name"),
        ("*", "all models"),
        ("/srv/models/tiny/", "tiny"),
        ("./tiny.gguf", "tiny.gguf"),
        ("~/hub/models--org--Big-1B/snapshots/12fd25f7", "org/Big-1B"),
        ("/", "/"),
    ],
)
def test_a_model_is_shown_by_its_name(model: str, shown: str) -> None:
    assert shown == shown_model(model)
