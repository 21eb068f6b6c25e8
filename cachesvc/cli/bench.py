"""`cachesvc bench`: time to first token on this machine, for short questions about a long
document."""

import logging
import platform
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from api.format import seconds
from cachesvc.cli.render import AsJson, print_json, print_table
from cachesvc.config.sources import load_settings

if TYPE_CHECKING:
    from cachesvc.bench import Measured

app = typer.Typer(no_args_is_help=True, help="Measure time to first token from each tier")


@app.callback()
def _group() -> None:
    pass


@app.command()
def ttft(
    sizes: Annotated[
        str, typer.Option(help="Tokens of the document; separate several with commas")
    ] = "1024,2048,4096",
    repeats: Annotated[int, typer.Option(min=1, help="Questions for each kind of hit")] = 5,
    model: Annotated[str | None, typer.Option(help="An alias, a folder, or a hub id")] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu or cuda")] = None,
    kv_dtype: Annotated[str | None, typer.Option(help="Data type of the KV")] = None,
    block_size: Annotated[int | None, typer.Option(min=1, help="Tokens in a block")] = None,
    json: AsJson = False,
) -> None:
    """Measure the time to first token of a question about a long document, cold and from each tier.

    Measure on a quiet machine: a busy second core slows arithmetic many times over.
    """
    # torch comes with them, and `--help` does not wait for it
    from cachesvc.bench import Scenario
    from cachesvc.server.compute import load

    logging.disable(logging.WARNING)
    wanted = _sizes(sizes)
    flags = {"model.name": model, "model.device": device, "model.kv_dtype": kv_dtype}
    settings = load_settings(flags | {"cache.block_size": block_size}).settings
    with _status() as report, tempfile.TemporaryDirectory(prefix="cachesvc-bench-") as folder:
        report("loading the model")
        loaded = load(settings.model, settings.server.data_dir)
        scenario = Scenario(
            loaded,
            kv_dtype=settings.model.kv_dtype,
            data_dir=Path(folder),
            engine=settings.engine,
            block_size=settings.cache.block_size,
            largest=max(wanted),
            repeats=repeats,
        )
        results = scenario.run(wanted, report)
    result = {
        "bench": "ttft",
        "model": loaded.name,
        "dtype": loaded.dtype,
        "kv_dtype": scenario.layout.dtype,
        "block_size": scenario.layout.block_size,
        "token_bytes": scenario.layout.token_nbytes,
        "machine": _machine(),
        "results": [asdict(each) for each in results],
    }
    if json:
        print_json(result)
    else:
        _print(results, f"{loaded.name}, {loaded.dtype}, KV {scenario.layout.dtype}")


def _sizes(text: str) -> list[int]:
    try:
        sizes = sorted({int(part) for part in text.split(",")})
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a list of sizes like 1024,2048") from None
    if sizes[0] < 1:
        raise typer.BadParameter("a document has at least one token")
    return sizes


@contextmanager
def _status() -> Iterator[Any]:
    console = Console(stderr=True)
    with console.status("starting") as status:
        yield lambda text: status.update(text) if console.is_terminal else None


def _print(results: "Sequence[Measured]", title: str) -> None:
    columns = (
        "prompt",
        "blocks from",
        "first token",
        "best",
        "worst",
        "hits",
        "computed",
        "faster",
    )
    rows = []
    for each in results:
        times = map(seconds, (each.ttft_s, each.best_s, each.worst_s))
        tokens = (each.hit_tokens, each.computed_tokens)
        rows.append((each.prompt_tokens, each.case, *times, *tokens, f"{each.ratio:.1f}x"))
    print_table(columns, rows, title=title, right=(columns[0], *columns[2:]))


def _machine() -> dict[str, str]:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "cpu": f"{len(models)} x {models[0]}" if models else platform.processor(),
        "python": platform.python_version(),
        "system": platform.system(),
    }
