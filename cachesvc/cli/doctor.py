"""`cachesvc doctor`: checks whether this machine can serve, and says what to fix.

Each check returns findings, changes nothing and needs no server. Checks that need torch import it
themselves, so that `--help` does not wait for it.
"""

import importlib.metadata
import importlib.util
import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.console import Console

from api.format import size
from billing.store.wal import ROOM_BYTES
from cachesvc.cli.options import DataDir, data_dir_of
from cachesvc.cli.render import AsJson, print_json
from cachesvc.config.places import NETWORK_FILE_SYSTEMS, disk_path, file_system
from cachesvc.config.sections import CacheSection
from cachesvc.config.sources import load_settings
from cachesvc.server.server_file import LiveError, find_server
from cachesvc.server.spare_memory import available_bytes
from engine.cgroups import memory_limit
from tiers.disk.directory import FORMAT, is_locked, read_holder, read_meta
from tiers.disk.room import allowed, reserve_of
from tiers.disk.storage import FileSystem

if TYPE_CHECKING:
    from engine.hardware import Hardware

PACKAGES = ("cachesvc", "api", "engine", "billing", "tiers")


class Level(StrEnum):
    """How bad a finding is. An error means that the server cannot work here."""

    OK = "ok"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Finding:
    check: str
    level: Level
    message: str
    fix: str = ""


def ok(check: str, message: str) -> Finding:
    return Finding(check, Level.OK, message)


def warning(check: str, message: str, fix: str) -> Finding:
    return Finding(check, Level.WARNING, message, fix)


def error(check: str, message: str, fix: str) -> Finding:
    return Finding(check, Level.ERROR, message, fix)


def doctor(data_dir: DataDir = None, json: AsJson = False) -> None:
    """Check this machine and say what to fix. Exits with 1 if something is broken."""
    findings = list(examine(data_dir_of(data_dir)))
    if json:
        print_json([asdict(finding) for finding in findings])
    else:
        for finding in findings:
            _print(finding)
    if any(finding.level is Level.ERROR for finding in findings):
        raise typer.Exit(1)


def examine(data_dir: Path) -> Iterator[Finding]:
    from engine.hardware import read_hardware

    hardware = read_hardware()
    yield check_layout({name: _folder(name) for name in PACKAGES})
    yield from check_versions()
    yield from check_compute(hardware)
    yield from check_disk(data_dir)
    yield check_lock(data_dir)
    yield from check_server(data_dir)


def check_layout(folders: Mapping[str, Path | None]) -> Finding:
    """Checks that the five packages are ours: all in one parent folder."""
    missing = [name for name, folder in folders.items() if folder is None]
    if missing:
        fix = "install cachesvc again in a virtual environment of its own"
        return error("layout", f"the package {', '.join(missing)} cannot be found", fix)
    parents = {folder.parent for folder in folders.values() if folder is not None}
    if len(parents) > 1:
        places = ", ".join(f"{name} in {folder}" for name, folder in folders.items())
        message = f"the packages do not share one parent folder: {places}"
        fix = "another distribution uses one of these names; give cachesvc its own environment"
        return error("layout", message, fix)
    return ok("layout", f"all five packages are in {parents.pop()}")


def check_versions() -> Iterator[Finding]:
    names = ("cachesvc", "torch", "transformers", "lmdb", "zstandard", "fastapi", "sqlalchemy")
    found, missing = [f"Python {sys.version.split()[0]}"], []
    for name in names:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            missing.append(name)
    yield ok("versions", ", ".join(found))
    if missing:
        yield error("versions", f"not installed: {', '.join(missing)}", "run `make setup`")


def check_compute(hardware: "Hardware") -> Iterator[Finding]:
    if hardware.gpu:
        yield ok("gpu", f"{hardware.gpu}, {size(hardware.gpu_bytes)}")
    else:
        yield ok("gpu", "none; the CPU stands in for it")
    yield from check_memory(load_settings().settings.cache, on_gpu=bool(hardware.gpu))


def check_memory(cache: CacheSection, *, on_gpu: bool) -> Iterator[Finding]:
    """Compares full caches with the limit of this process's control group and with what is
    free."""
    from cachesvc.server.memory_limit import of_server

    caches, limit, available = of_server(cache, on_gpu=on_gpu), memory_limit(), available_bytes()
    needed, fix = caches.num_bytes, f"lower {caches.largest}"
    takes = f"full caches take {size(needed)}"
    if limit is not None and needed > limit:
        yield warning("memory", f"{takes}, and the control group's limit is {size(limit)}", fix)
    elif available is not None and needed > available:
        yield warning("memory", f"{takes}, and {size(available)} are available", fix)
    elif available is not None:
        yield ok("memory", f"{size(available)} available, {takes}")


def check_disk(data_dir: Path) -> Iterator[Finding]:
    stands = next(path for path in (data_dir, *data_dir.parents) if path.exists())
    if not os.access(stands, os.W_OK):
        yield error("disk", f"{stands} cannot be written", "choose another --data-dir")
    cache = load_settings().settings.cache
    wanted, files = cache.disk_bytes, disk_path(data_dir).glob("shard-*/data.mdb")
    held = sum(file.stat().st_blocks * 512 for file in files)
    total, _, free = shutil.disk_usage(stands)
    reserve = reserve_of(cache.disk_reserve_bytes, total)
    may = allowed(held, held, FileSystem(total, free), reserve, failed=False)
    message = f"{size(free)} free in {stands}; the disk tier holds {size(held)} of {size(wanted)}"
    if free < ROOM_BYTES:
        fix = "free space: no new block is kept, and a ledger in SQLite there refuses every request"
        yield error("disk", message, fix)
    elif may < wanted:
        less = f"{message}, and may hold {size(may)}: {size(reserve)} are left to others"
        yield warning("disk", less, "free space, or lower --disk-cache to what it may hold")
    else:
        yield ok("disk", message)
    kind = file_system(stands)
    if kind in NETWORK_FILE_SYSTEMS:
        message = f"{stands} is on {kind}; LMDB needs a local file system"
        yield error("file system", message, "choose a --data-dir on a local disk")
    elif kind == "tmpfs":
        message = f"{stands} is in memory ({kind}); blocks there are lost at a restart"
        yield warning("file system", message, "choose a --data-dir on a disk")
    else:
        yield ok("file system", kind or "unknown")


def check_lock(data_dir: Path) -> Finding:
    check, path = "data directory", disk_path(data_dir)
    if data_dir.is_file():
        return error(check, f"{data_dir} is a file", "name a folder with --data-dir")
    if is_locked(path):
        return ok(check, f"served by {read_holder(path)}")
    if not data_dir.exists():
        return ok(check, f"{data_dir} does not exist yet; a start makes it")
    meta = read_meta(path)
    if meta is None:
        return ok(check, f"{data_dir} holds no disk tier yet")
    if meta.format != FORMAT:
        message = f"the disk tier is of format {meta.format}, this version writes {FORMAT}"
        fix = "the next start drops its blocks; keep the older version to go on using them"
        return warning(check, message, fix)
    closed = "was closed cleanly" if meta.clean else "was not closed cleanly; that is survived"
    return ok(check, f"no server runs; the disk tier {closed}")


def check_server(data_dir: Path) -> Iterator[Finding]:
    try:
        server = find_server(data_dir)
        if server is None:
            return
        ready = server.get("/health/ready")
    except LiveError as failure:
        fix = "mend that; the server goes on by itself, unless its reason or its log says otherwise"
        yield error("server", f"it does not serve: {failure}", fix)
        return
    if degraded := ready.get("degraded"):
        fix = "mend that; requests are served meanwhile"
        yield warning("server", f"degraded: {'; '.join(degraded)}", fix)
    else:
        yield ok("server", f"ready at {server.url}")


def _folder(package: str) -> Path | None:
    spec = importlib.util.find_spec(package)
    locations = list(spec.submodule_search_locations or ()) if spec else []
    return Path(locations[0]) if locations else None


_MARKS: Mapping[Level, str] = {
    Level.OK: "[green]ok[/]     ",
    Level.WARNING: "[yellow]warning[/]",
    Level.ERROR: "[red]error[/]  ",
}


def _print(finding: Finding) -> None:
    console = Console(highlight=False, soft_wrap=True)
    message = finding.message.replace("[", r"\[")
    console.print(f"{_MARKS[finding.level]} {finding.check}: {message}")
    if finding.fix:
        console.print(f"        fix: {finding.fix}".replace("[", r"\["))
