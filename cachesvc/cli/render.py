"""How commands print: tables for people, JSON for programs, one sentence for an error."""

import json as jsons
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Annotated, Any, NoReturn

import typer
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table

PIPE_WIDTH = 200

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for programs")]


def fail(message: str, code: int = 1) -> NoReturn:
    Console(stderr=True, highlight=False).print(
        f"[red]error:[/] {_escape(message)}", soft_wrap=True
    )
    sys.exit(code)


def note(message: str) -> None:
    """Prints a line for the user on standard error, apart from the output that programs read."""
    Console(stderr=True, highlight=False).print(_escape(message), soft_wrap=True)


def confirm(question: str, *, yes: bool) -> None:
    """Asks on standard error before an irreversible step; ends the command unless the answer is
    yes."""
    if yes:
        return
    try:
        agreed = typer.confirm(question, err=True)
    except typer.Abort:
        fail("nothing was changed: nobody can confirm, as standard input is no terminal; add --yes")
    if not agreed:
        fail("nothing was changed")


def must_ask(yes: bool) -> bool:
    """Whether to ask before money moves: only a person at a terminal, who did not say --yes."""
    return not yes and sys.stdin.isatty() and sys.stderr.isatty()


@contextmanager
def progress(what: str, total: int | None) -> Iterator[Callable[[int], None]]:
    """A progress bar while the block runs, if standard error is a terminal.

    Yields the function that advances it. `total` is None if the length is unknown.
    """
    console = Console(stderr=True)
    from rich.progress import Progress

    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(what, total=total)
        yield lambda amount: bar.advance(task, amount)


def print_json(data: Any) -> None:
    """Print `data` as indented JSON; paths and enums as their text."""
    typer.echo(jsons.dumps(data, indent=2, default=str, ensure_ascii=False))


def answer(data: Any, json: bool, *lines: str) -> None:
    """Prints what a command did: `data` as JSON, or `lines` for people."""
    if json:
        print_json(data)
    elif lines:
        typer.echo("\n".join(lines))


def print_table(
    columns: Sequence[str],
    rows: Iterable[Sequence[object]],
    *,
    title: str | None = None,
    right: Sequence[str] = (),
    spare: Sequence[str] = (),
) -> None:
    """Prints rows. The columns in `right` hold numbers, which are never wrapped.

    If the terminal is too narrow, columns in `spare` are omitted, in their order.
    """
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=PIPE_WIDTH)  # do not wrap in a file
    table, left_out = fitting_table(columns, rows, console.width, right=right, spare=spare)
    table.title, table.title_justify = title, "left"
    console.print(table)
    if left_out:
        note(f"not shown here, but in a wider window and with --json: {', '.join(left_out)}")


def fitting_table(
    columns: Sequence[str],
    rows: Iterable[Sequence[object]],
    width: int,
    *,
    right: Sequence[str],
    spare: Sequence[str],
) -> tuple[Table, list[str]]:
    """A table of at most this width, if leaving out columns in `spare` makes it so; and these."""
    cells = [[str(cell) for cell in row] for row in rows]
    widths = {
        name: max(map(cell_len, (name, *column)))
        for name, *column in zip(columns, *cells, strict=True)
    }
    left_out: list[str] = []
    for name in spare:
        if sum(widths.values()) + 2 * (len(widths) - 1) > width and name in widths:
            left_out.append(name)
            del widths[name]
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name, least in widths.items():
        if name in right:
            table.add_column(name, justify="right", no_wrap=True, min_width=least)
        else:
            table.add_column(name, overflow="fold")
    for row in cells:
        pairs = zip(columns, row, strict=True)
        table.add_row(*(_escape(cell) for name, cell in pairs if name in widths))
    return table, left_out


Column = str | Callable[[Any], object]  # a field of a document, or what a cell says of it


def print_documents(
    found: Sequence[Mapping[str, Any]],
    json: bool,
    columns: Mapping[str, Column] | Sequence[str],
    *,
    right: Sequence[str] = (),
    spare: Sequence[str] = (),
    none: str = "",
) -> None:
    """Prints documents as JSON, or as a table with these columns by their headings.

    Headings alone are the fields' names. `none` is said below an empty table.
    """
    if json:
        print_json(found)
        return
    cells = columns if isinstance(columns, Mapping) else {name: name for name in columns}
    rows = [[_cell(each, column) for column in cells.values()] for each in found]
    print_table(tuple(cells), rows, right=right, spare=spare)
    if none and not found:
        note(none)


def _cell(document: Mapping[str, Any], column: Column) -> object:
    value = document.get(column) if isinstance(column, str) else column(document)
    return "" if value is None else value


def print_pairs(pairs: Mapping[str, object]) -> None:
    width = max(map(len, pairs), default=0)
    for name, value in pairs.items():
        typer.echo(f"{name:<{width}}  {_plain(value)}")


def _plain(value: object) -> object:
    if value is None:
        return "-"
    return ("no", "yes")[value] if isinstance(value, bool) else value


def _escape(text: str) -> str:
    return text.replace("[", r"\[")
