"""The bar of a server's start, on terminals of several kinds."""

import io

import pytest
from rich.console import Console

from cachesvc.cli.startup_bar import StartupBar


@pytest.mark.parametrize("encoding", ["ascii", "utf-8"])
def test_a_terminal_gets_only_what_it_can_show(encoding: str) -> None:
    """Its own stream would write the code of a character that it lacks: `\\u280b`."""
    screen = io.BytesIO()
    file = io.TextIOWrapper(screen, encoding=encoding, errors="strict")
    with StartupBar(Console(file=file, force_terminal=True, width=40)) as bar:
        bar.show("importing torch", None)
    file.flush()
    assert "importing torch" in screen.getvalue().decode(encoding)
