"""Writes CSV that a spreadsheet may open. Pure; for statements and exports.

A cell that begins like a formula is run by spreadsheets, and names and reasons come from others; it
gets an apostrophe in front, as OWASP advises against CSV injection. Numbers stay numbers. A row is
one line, so that a torn one can be told.
"""

import csv
import re
from collections.abc import Callable, Iterable
from typing import TextIO

_NUMBER = re.compile(r"[+-]?\d+(\.\d+)?")


def safe_writer(out: TextIO) -> Callable[[Iterable[object]], None]:
    """What writes a row to `out`."""
    writer = csv.writer(out, lineterminator="\n")

    def write(cells: Iterable[object]) -> None:
        writer.writerow([safe_cell(str(cell)) for cell in cells])

    return write


def safe_cell(text: str) -> str:
    """The cell on one line, and as text where it would be a formula."""
    text = " ".join(text.splitlines())
    is_formula = text.startswith(("=", "+", "-", "@", "\t")) and not _NUMBER.fullmatch(text)
    return f"'{text}" if is_formula else text
