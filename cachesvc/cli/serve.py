"""`cachesvc serve`: starts a server with one command."""

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

import cachesvc
from api.format import seconds, size
from cachesvc.cli import leave
from cachesvc.cli.config import shown
from cachesvc.cli.options import named
from cachesvc.cli.overrides import HELP, overridden, overriding
from cachesvc.config.sections import CacheSection
from cachesvc.config.settings import Settings
from cachesvc.config.sources import load_settings
from cachesvc.serve import Startup
from cachesvc.serve import serve as run
from cachesvc.server.logs import configure
from cachesvc.server.vllm.arguments import read_options

if TYPE_CHECKING:
    from tiers.stats import CacheStats
    from tiers.tier import TierStats

logger = logging.getLogger(__name__)

ROUNDED = 1 / 16  # a tier may have this part less or more than set, as it holds whole blocks


def serve(
    context: typer.Context,
    model: Annotated[str | None, overriding("model.name", "--model")] = None,
    adapter: Annotated[
        list[str] | None,
        typer.Option(
            "--adapter", metavar="NAME=SOURCE", help=f"{HELP['model.adapters']}; may be repeated"
        ),
    ] = None,
    host: Annotated[str | None, overriding("server.host", "--host")] = None,
    port: Annotated[int | None, overriding("server.port", "--port")] = None,
    data_dir: Annotated[Path | None, overriding("server.data_dir", "--data-dir")] = None,
    device: Annotated[str | None, overriding("model.device", "--device")] = None,
    engine: Annotated[list[str] | None, overriding("engine.backend", "--engine")] = None,
    device_cache: Annotated[str | None, overriding("cache.device_bytes", "--device-cache")] = None,
    host_cache: Annotated[str | None, overriding("cache.host_bytes", "--host-cache")] = None,
    disk_cache: Annotated[str | None, overriding("cache.disk_bytes", "--disk-cache")] = None,
    block_size: Annotated[int | None, overriding("cache.block_size", "--block-size")] = None,
    dtype: Annotated[str | None, overriding("model.dtype", "--dtype")] = None,
    kv_dtype: Annotated[str | None, overriding("model.kv_dtype", "--kv-dtype")] = None,
    max_running: Annotated[int | None, overriding("engine.max_running", "--max-running")] = None,
    chunk_tokens: Annotated[int | None, overriding("engine.chunk_tokens", "--chunk-tokens")] = None,
    require_keys: Annotated[
        bool | None, overriding("server.require_keys", "--require-keys/--no-require-keys")
    ] = None,
    log_level: Annotated[str | None, overriding("log.level", "--log-level")] = None,
    config: Annotated[
        Path | None, typer.Option(help="Configuration file (TOML); flags and environment win")
    ] = None,
) -> None:
    """Serve a model over HTTP, with its context cache. Sizes are written like 64MiB or 4GiB.

    With --engine vllm, vLLM runs the model, and --vllm.NAME VALUE passes it an argument.

    Every setting can also come from --config or from the environment; `cachesvc config show` lists
    each one with its origin.
    """
    flags = overridden(context)
    flags["engine.backend"] = engine or None
    example = "NAME=SOURCE, as in --adapter sql=./sql"
    flags["model.adapters"] = named("--adapter", adapter or (), example) or None
    flags["engine.vllm"] = read_options(context.args, _options_of(context)) or None
    loaded = load_settings(flags, config)
    settings = loaded.settings
    configure(settings.log)
    console = Console(stderr=True, highlight=False)
    startup = Startup()

    def ready(cache: "CacheStats", url: str, link: str) -> None:
        rows = (row for row in loaded.rows() if row.origin != "default")
        given = ", ".join(f"{row.name} = {shown(row.name, row.value)}" for row in rows)
        logger.info(f"settings that are not the default: {given or 'none'}")
        _announce(settings, cache, startup, console, url, link)

    run(settings, startup=startup, on_ready=ready)
    leave(0)  # all is closed and written


# vLLM's arguments are passed through; `read_options` refuses anything else left over.
serve.context_settings = {  # type: ignore[attr-defined]
    "allow_extra_args": True,
    "ignore_unknown_options": True,
}


def _options_of(context: typer.Context) -> list[str]:
    return [name for each in context.command.params for name in (*each.opts, *each.secondary_opts)]


def _tier(asked: CacheSection, name: str, found: "TierStats | None") -> str:
    """A tier's capacity, and its setting where that is another; empty if it is off."""
    wanted, has = getattr(asked, f"{name}_bytes"), found.capacity_bytes if found is not None else 0
    differs = wanted and abs(has - wanted) > ROUNDED * wanted
    if not (wanted or has):
        return ""
    return f"{name} {size(has)}{f' instead of {size(wanted)}' if differs else ''}"


def _announce(
    settings: Settings, cache: "CacheStats", startup: Startup, console: Console, url: str, link: str
) -> None:
    """Prints the server's address and, on a terminal only, a login link for the dashboard."""
    found = {"device": cache.device, "host": cache.host, "disk": cache.disk}
    told = (_tier(settings.cache, name, each) for name, each in found.items())
    tiers = ", ".join(filter(None, told))
    each = settings.each()
    if all(one.engine.urls for one in each):
        tiers = f"computed at {', '.join(url for one in each for url in one.engine.urls)}"
    names = ", ".join(one.model.client_name for one in each)
    logger.info(
        f"cachesvc {cachesvc.__version__} serves {names} on {url} "
        f"({tiers}; data in {settings.server.data_dir})"
    )
    took = ", ".join(f"{phase} {seconds(took_s)}" for phase, took_s in startup.took_s.items())
    logger.info(f"ready after {seconds(startup.total_s)}: {took}")
    if console.is_terminal:
        console.print(f"Dashboard (this link logs in once): {link}", soft_wrap=True)
    else:
        logger.info(f"dashboard at {url}/admin; `cachesvc admin link` prints a link that logs in")
