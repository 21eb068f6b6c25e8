"""The README's matrix of clients is what the committed results say."""

import json
from pathlib import Path

from tests.clients.matrix import PROGRAMS, RESULTS, rows

README = Path(__file__).parents[2] / "README.md"


def test_the_readme_shows_what_the_clients_did():
    results = json.loads(RESULTS.read_text(encoding="utf-8"))
    assert "\n".join(rows(results)) in README.read_text(encoding="utf-8"), (
        "run `python -m tests.clients.matrix` and paste its table"
    )


def test_each_cell_was_tried_and_passed():
    results = json.loads(RESULTS.read_text(encoding="utf-8"))["clients"]
    assert {name: set(program.cells()) for name, program in PROGRAMS.items()} == {
        name: {cell for cell, line in told["cells"].items() if "seen" in line}
        for name, told in results.items()
    }
