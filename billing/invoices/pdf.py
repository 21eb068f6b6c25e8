"""An invoice as PDF, by fpdf2; the only place that imports it. The same document gives the same
bytes.

fpdf2's own fonts have the letters of western Europe. For others a TrueType font of this machine is
embedded, with only the used glyphs.
"""

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from billing.errors import InvoiceError
from billing.money import grouped
from billing.names import shown_model

# Common font files, plain and bold, the one with the fewest scripts first.
FONTS = (
    ("truetype/dejavu/DejaVuSans.ttf", "truetype/dejavu/DejaVuSans-Bold.ttf"),
    ("TTF/DejaVuSans.ttf", "TTF/DejaVuSans-Bold.ttf"),
    ("truetype/noto/NotoSans-Regular.ttf", "truetype/noto/NotoSans-Bold.ttf"),
    ("opentype/noto/NotoSansCJK-Regular.ttc", "opentype/noto/NotoSansCJK-Bold.ttc"),
    ("noto-cjk/NotoSansCJK-Regular.ttc", "noto-cjk/NotoSansCJK-Bold.ttc"),
    ("truetype/wqy/wqy-zenhei.ttc", "truetype/wqy/wqy-zenhei.ttc"),
)
FONT_FOLDER = Path("/usr/share/fonts")
FAMILY = "invoice"
WIDTHS = (80, 28, 22, 28, 24)  # of the table's columns, in millimetres
WIDTH = sum(WIDTHS)
GREY = 105
ROWS_WITH_TOTALS = 4

Document = dict[str, Any]
_Row = tuple[str, tuple[str, ...]]  # the heading of its group, and its cells


def invoice_pdf(document: Document, title: str, watermark: str) -> bytes:
    """The PDF's bytes. Raises `InvoiceError` if fpdf2 or a font is missing."""
    pdf, is_apart = _drawn(document, title, watermark, num_kept=0)
    if is_apart:  # totals on a page of their own: the last rows go with them
        pdf, _ = _drawn(document, title, watermark, num_kept=ROWS_WITH_TOTALS)
    return bytes(pdf.output())


def _drawn(document: Document, title: str, watermark: str, *, num_kept: int) -> tuple[Any, bool]:
    """The pages, and whether the last one has totals or notes without a row of the table.

    With `num_kept`, a page begins before this many last rows.
    """
    pdf = _new_pdf(title)
    pdf.set_author(document["seller"]["name"])
    day = document.get("issued_on", document["period"]["last"])
    pdf.set_creation_date(datetime.fromisoformat(day).replace(tzinfo=UTC))
    _choose_font(pdf, title + watermark + _texts(document))
    pdf.add_page()
    _head(pdf, document, title, watermark)
    rows = _rows(document)
    first, last = (rows[:-num_kept], rows[-num_kept:]) if num_kept else (rows, [])
    for part in filter(None, (first, last)):
        if first and part is last:
            pdf.add_page()
        _table(pdf, part)
    page = pdf.page_no()
    _sums(pdf, document)
    _notes(pdf, document)
    return pdf, bool(rows) and pdf.page_no() > page


def _new_pdf(title: str) -> Any:
    try:
        from fpdf import FPDF
    except ModuleNotFoundError as error:
        raise InvoiceError('a PDF needs fpdf2: pip install "cachesvc[invoices]"') from error

    class Paper(FPDF):  # type: ignore[misc]
        def footer(self) -> None:
            self.set_y(-14)
            self.set_font(size=7.5)
            self.set_text_color(GREY)
            self.cell(0, 4, f"{title}, page {self.page_no()} of {{nb}}", align="C")
            self.set_text_color(0)

    pdf = Paper(format="A4")
    pdf.set_margins(14, 14)
    pdf.set_auto_page_break(True, 18)
    pdf.set_title(title)
    pdf.set_lang("en")
    return pdf


def _texts(value: Any) -> str:
    """All text of a document, to choose a font."""
    if isinstance(value, dict):
        return "".join(map(_texts, value.values()))
    return "".join(map(_texts, value)) if isinstance(value, list) else str(value)


def _choose_font(pdf: Any, text: str) -> None:
    letters = {ord(letter) for letter in text}
    if all(letter < 0x100 for letter in letters):
        pdf.set_font("helvetica", size=9)
        return
    missing = letters
    for number, (plain, bold) in enumerate(FONTS):
        if not (FONT_FOLDER / plain).exists():
            continue
        family = f"{FAMILY}{number}"
        pdf.add_font(family, "", FONT_FOLDER / plain)
        heavy = FONT_FOLDER / bold
        pdf.add_font(family, "B", heavy if heavy.exists() else FONT_FOLDER / plain)
        missing = letters - pdf.fonts[family].cmap.keys()
        if not missing:
            pdf.set_font(family, size=9)
            return
    raise InvoiceError(
        f"no font on this machine has {chr(min(missing))!r}: install one, such as Debian's "
        "fonts-noto-cjk, or print the invoice as HTML"
    )


def _head(pdf: Any, document: Document, title: str, watermark: str) -> None:
    seller, buyer, period = document["seller"], document["buyer"], document["period"]
    pdf.set_font(style="B", size=12)
    pdf.multi_cell(WIDTH, 6, seller["name"], new_x="LMARGIN", new_y="NEXT")
    _small(pdf, [*seller["address"], seller["email"], _named("Tax number", seller["tax_id"])])
    pdf.ln(6)
    pdf.set_font(style="B", size=20)
    pdf.cell(WIDTH * 0.7, 10, title)
    pdf.set_text_color(190, 30, 30)
    pdf.cell(0, 10, watermark, align="R", new_x="LMARGIN", new_y="NEXT")
    pdf.set_text_color(0)
    pdf.ln(3)
    top = pdf.y
    pdf.set_font(style="B", size=9.5)
    pdf.multi_cell(WIDTH / 2 - 4, 5, buyer["name"], new_x="LMARGIN", new_y="NEXT")
    reference = _named("Your reference", buyer["reference"])
    _small(pdf, [*buyer["address"], _named("Tax number", buyer["tax_id"]), reference])
    bottom, pdf.y = pdf.y, top
    facts = [
        ("Account", document["tenant"]),
        ("Period", f"{period['first']} to {period['last']}"),
        ("Time zone", period["timezone"]),
        ("Issued on", document.get("issued_on", "")),
        ("Due on", document.get("due_on", "") if document["kind"] == "invoice" else ""),
        ("Of invoice", document.get("credits", "")),
        ("Requests", grouped(document["requests"]) if "requests" in document else ""),
        ("Currency", document["currency"]),
    ]
    for name, value in facts:
        if value:
            pdf.set_x(14 + WIDTH / 2)
            _grey(pdf, name)
            pdf.cell(0, 5, value, align="R", new_x="LMARGIN", new_y="NEXT")
    pdf.y = max(pdf.y, bottom) + 5


def _small(pdf: Any, lines: list[str]) -> None:
    pdf.set_font(style="", size=9)
    for line in filter(None, lines):
        pdf.multi_cell(WIDTH / 2 - 4, 4.5, line, new_x="LMARGIN", new_y="NEXT")


def _named(name: str, value: str) -> str:
    return f"{name} {value}" if value else ""


def _grey(pdf: Any, text: str) -> None:
    pdf.set_font(style="", size=9)
    pdf.set_text_color(GREY)
    pdf.cell(32, 5, text)
    pdf.set_text_color(0)


def _rows(document: Document) -> list[_Row]:
    """The rows of the table, each with the heading of its group."""
    rows: list[_Row] = []
    for line in document["lines"]:
        of = (shown_model(line["model"]), line["rate_card"], line["window"])
        group = ", ".join(part for part in of if part != "standard")
        quantity = grouped(line["quantity"]) if line["quantity"] else ""
        exact, amount = grouped(line["exact"]), grouped(line["amount"])
        rows.append((group, (line["label"], quantity, line["per_million"], exact, amount)))
    rows += (
        ("", (row["label"], "", "", grouped(row["exact"]), grouped(row["amount"])))
        for row in document["adjustments"]
    )
    return rows


def _table(pdf: Any, rows: list[_Row]) -> None:
    from fpdf.fonts import FontFace

    strong, pale = FontFace(emphasis="BOLD"), FontFace(emphasis="BOLD", color=GREY)
    pdf.set_font(style="", size=8.5)
    options = {
        "col_widths": WIDTHS,
        "width": WIDTH,
        "text_align": ("LEFT", "RIGHT", "RIGHT", "RIGHT", "RIGHT"),
        "line_height": 4.6,
        "borders_layout": "HORIZONTAL_LINES",
        "headings_style": pale,
        "padding": (0.6, 0.8),
    }
    pdf.set_draw_color(215)
    with pdf.table(**options) as table:
        table.row(("Description", "Quantity", "Per million", "Exact", "Amount"))
        heading = ""
        for group, cells in rows:
            if group and group != heading:
                table.row(style=strong).cell(group, colspan=5)
            heading = group
            table.row(cells)


def _sums(pdf: Any, document: Document) -> None:
    rows = [("Net", document["net"], False)]
    for tax in document["taxes"]:
        label = f"{tax['name']} {tax['rate']} % of {grouped(tax['base'])}"
        rows.append((label, tax["amount"], False))
    currency = document["currency"]
    rows.append((f"Total {currency}", document["total"], True))
    if document["kind"] == "invoice":
        rows.append(("Paid in advance from the balance", document["paid_in_advance"], False))
        rows.append((f"Amount due {currency}", document["due"], True))
    pdf.ln(3)
    if pdf.will_page_break(6 * len(rows)):
        pdf.add_page()
    for label, amount, is_strong in rows:
        pdf.set_font(style="B" if is_strong else "", size=10 if is_strong else 9)
        pdf.set_x(14 + WIDTH / 2)
        pdf.cell(WIDTH / 2 - 34, 5.6, label)
        pdf.cell(34, 5.6, grouped(amount), align="R", new_x="LMARGIN", new_y="NEXT")


def _notes(pdf: Any, document: Document) -> None:
    notes = [document["buyer"]["note"], document["seller"]["note"]]
    if document["kind"] == "invoice":
        notes.insert(0, document["seller"]["payment"])
    pdf.ln(4)
    pdf.set_font(style="", size=9)
    for note in filter(None, notes):
        pdf.multi_cell(WIDTH, 4.8, note, new_x="LMARGIN", new_y="NEXT")
        pdf.ln(1)
