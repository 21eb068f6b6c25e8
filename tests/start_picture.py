"""The picture of a first start in docs/images, of a real server on a terminal: `make pictures`."""

import io
import re
import sys
import tempfile
from itertools import groupby
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.style import Style
from rich.text import Text

from tests.terminal import COLUMNS, Terminal, on_a_terminal

PICTURE = Path(__file__).parents[1] / "docs" / "images" / "start.svg"
FONT_FACE = re.compile(r"@font-face \{.*?\}\s*", re.DOTALL)
SCRIPT = Path(sys.executable).with_name("cachesvc")


def shown(terminal: Terminal) -> Text:
    """The screen with its colours, down to its last line that says something."""
    text, screen = Text(), terminal.screen
    last = max(row for row, line in enumerate(terminal.lines) if line)
    for row in range(last + 1):
        cells = [screen.buffer[row][column] for column in range(len(terminal.lines[row]))]
        for style, run in groupby(cells, _style):
            text.append("".join(cell.data for cell in run), style)
        text.append("\n")
    return text


def _style(cell: Any) -> Style:
    colour = None if cell.fg == "default" else _colour(cell.fg)
    return Style(color=colour, bold=cell.bold, underline=cell.underscore)


def _colour(name: str) -> str:
    """A colour of pyte as rich writes it; pyte calls yellow brown."""
    name = name.replace("brown", "yellow")
    bright = name.removeprefix("bright")
    return f"#{name}" if len(name) == 6 and name.isalnum() and not name.isalpha() else bright


def main(picture: Path) -> None:
    """Write the screen of a start in an empty data directory, once it is ready."""
    console = Console(record=True, width=COLUMNS, file=io.StringIO())
    with tempfile.TemporaryDirectory() as folder:
        command = [str(SCRIPT), "serve", "--data-dir", "data"]
        with on_a_terminal(command, Path(folder)) as terminal:
            terminal.read_until("admin/login?token=", deadline_s=300)
            console.print(Text("$ make serve", style="bold"))
            console.print(shown(terminal), end="")
            terminal.stop()
    svg = console.export_svg(title="make serve")
    picture.write_text(FONT_FACE.sub("", svg), encoding="utf-8")  # nothing from another host


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else PICTURE)
