"""An invoice as JSON, CSV, a printable page or PDF, for commands and routes. Pure."""

import io
from collections.abc import Sequence
from enum import StrEnum

import orjson

from billing.invoices.document import CREDIT_NOTE, INVOICE, Document
from billing.invoices.pdf import invoice_pdf
from billing.invoices.register import Invoice, InvoiceState
from billing.reports.csv import safe_writer
from billing.reports.page import page


class Form(StrEnum):
    JSON = "json"
    CSV = "csv"
    HTML = "html"
    PDF = "pdf"


MEDIA_TYPES = {
    Form.JSON: "application/json",
    Form.CSV: "text/csv",
    Form.HTML: "text/html",
    Form.PDF: "application/pdf",
}
CSV_COLUMNS = (
    *("number", "kind", "state", "tenant", "month", "currency", "issued_on", "due_on"),
    *("model", "rate_card", "window", "row", "label", "quantity", "per_million"),
    *("exact", "amount"),
)


def render(invoice: Invoice, form: Form) -> bytes:
    """The invoice's bytes. Raises `InvoiceError` if no PDF can be made here."""
    match form:
        case Form.JSON:
            return orjson.dumps(invoice.as_json())
        case Form.CSV:
            return invoices_csv([invoice]).encode()
        case Form.HTML:
            return invoice_html(invoice).encode()
        case Form.PDF:
            return invoice_pdf(invoice.document, title_of(invoice), _watermark(invoice))


def title_of(invoice: Invoice) -> str:
    kind = {INVOICE: "Invoice", CREDIT_NOTE: "Credit note"}[invoice.document["kind"]]
    return f"{kind} {invoice.number}".strip()


def _watermark(invoice: Invoice) -> str:
    """The large text across a draft or void invoice."""
    return {InvoiceState.DRAFT: "DRAFT", InvoiceState.VOID: "VOID"}.get(invoice.state, "")


def summary(invoice: Invoice) -> Document:
    """The invoice on one line."""
    document = invoice.document
    names = ("number", "kind", "tenant", "currency", "net", "total", "due", "issued_on", "due_on")
    return {
        **{name: document[name] for name in names},
        "month": document["period"]["month"],
        "credits": document.get("credits"),
        "state": invoice.state.value,
    }


def invoice_html(invoice: Invoice) -> str:
    """A page to print."""
    return page(
        "invoice.html",
        invoice=invoice.document,
        title=title_of(invoice),
        state=invoice.state.value,
        watermark=_watermark(invoice),
    )


def invoices_csv(invoices: Sequence[Invoice]) -> str:
    """A row for each line, adjustment and tax. An invoice's `amount` column sums to its total."""
    out = io.StringIO()
    write = safe_writer(out)
    write(CSV_COLUMNS)
    for invoice in invoices:
        document = invoice.document
        head = (
            invoice.number,
            document["kind"],
            invoice.state.value,
            document["tenant"],
            document["period"]["month"],
            document["currency"],
            document.get("issued_on", ""),
            document.get("due_on", ""),
        )
        for line in document["lines"]:
            names = ("model", "rate_card", "window", "class", "label", "quantity", "per_million")
            write((*head, *(line[name] for name in names), line["exact"], line["amount"]))
        for row in document["adjustments"]:
            shown = (row["name"], row["label"], "", "", row["exact"], row["amount"])
            write((*head, "", "", "", *shown))
        for tax in document["taxes"]:
            label = f"{tax['name']} {tax['rate']} %"
            write((*head, "", "", "", "tax", label, "", "", tax["amount"], tax["amount"]))
    return out.getvalue()
