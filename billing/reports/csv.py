"""Writes CSV that a spreadsheet may open. Pure; for statements and exports.

Spreadsheets run a cell that begins like a formula, and names and reasons come from users. Such a
cell gets a leading apostrophe, as OWASP advises against CSV injection. Numbers stay numbers. A row
is one line, so that a torn row can be detected.
"""

import csv
import re
from collections.abc import Callable, Iterable
from typing import TextIO

# The wide forms count too: spreadsheets in some languages read them as the others.
_FORMULA = ("=", "+", "-", "@", "\t", "\uff1d", "\uff0b", "\uff0d", "\uff20")
_NUMBER = re.compile(r"[+-]?\d+(\.\d+)?")


def safe_writer(out: TextIO) -> Callable[[Iterable[object]], None]:
    """A function that writes a row to `out`."""
    writer = csv.writer(out, lineterminator="\n")

    def write(cells: Iterable[object]) -> None:
        writer.writerow([safe_cell(str(cell)) for cell in cells])

    return write


def safe_cell(text: str) -> str:
    """The cell on one line, and as text if it would be a formula."""
    text = " ".join(text.splitlines())
    is_formula = text.startswith(_FORMULA) and not _NUMBER.fullmatch(text)
    return f"'{text}" if is_formula else text
