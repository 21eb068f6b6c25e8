"""`cachesvc bench`: time to first token on this machine, for short questions about a long
document."""

import logging
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from api.format import seconds
from cachesvc.cli.render import AsJson, print_json, print_table, progress
from cachesvc.config.sources import load_settings

if TYPE_CHECKING:
    from cachesvc.bench import Measured

app = typer.Typer(no_args_is_help=True, help="Measure time to first token from each tier")


@app.command()
def ttft(
    sizes: Annotated[
        str, typer.Option(help="Tokens of the document; separate several with commas")
    ] = "1024,2048,4096",
    json: AsJson = False,
) -> None:
    """Measure the time to first token of a question about a long document, cold and from each tier.

    The settings of a server apply, such as CACHESVC_MODEL__NAME. Measure on a quiet machine: a busy
    second core slows arithmetic many times over.
    """
    # torch comes with them, and `--help` does not wait for it
    from cachesvc.bench import CASES, Scenario
    from cachesvc.server.compute import load

    logging.disable(logging.WARNING)
    wanted = _sizes(sizes)
    settings = load_settings().settings
    loaded = load(settings.model, settings.server.data_dir)
    with tempfile.TemporaryDirectory(prefix="cachesvc-bench-") as folder:
        scenario = Scenario(loaded, settings, Path(folder), max(wanted))
        with progress("asking", len(wanted) * len(CASES)) as done:
            results = scenario.run(wanted, done)
    layout = scenario.layout
    if json:
        told: dict[str, object] = {"bench": "ttft", "model": loaded.name, "dtype": loaded.dtype}
        told |= {"kv_dtype": layout.dtype, "block_size": layout.block_size}
        rows = [asdict(each) for each in results]
        print_json(told | {"token_bytes": layout.token_nbytes, "results": rows})
    else:
        _print(results, f"{loaded.name}, {loaded.dtype}, KV {layout.dtype}")


def _sizes(text: str) -> list[int]:
    try:
        sizes = sorted({int(part) for part in text.split(",")})
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a list of sizes like 1024,2048") from None
    if sizes[0] < 1:
        raise typer.BadParameter("a document has at least one token")
    return sizes


def _print(results: "Sequence[Measured]", title: str) -> None:
    columns = ("prompt", "blocks from", "first token", "best", "worst", "hits", "computed")
    rows = []
    for each in results:
        times = map(seconds, (each.ttft_s, each.best_s, each.worst_s))
        tokens = (each.hit_tokens, each.computed_tokens)
        rows.append((each.prompt_tokens, each.case, *times, *tokens, f"{each.ratio:.1f}x"))
    figures = (columns[0], *columns[2:], "faster")
    print_table((*columns, "faster"), rows, title=title, right=figures)
