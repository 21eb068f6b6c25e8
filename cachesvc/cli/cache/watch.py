"""`cachesvc cache stats -i`: the tiers of the running server, a line an interval, like vmstat."""

import itertools
import time
from collections.abc import Mapping
from typing import Any

import typer

from cachesvc.cli.render import percent, print_json_line, print_table, size
from cachesvc.server.server_file import LiveServer

HEADER_EVERY = 20
COLUMNS = (
    ("device", ("blocks", "hit/s", "in/s", "out/s")),
    ("host", ("blocks", "hit/s", "in/s", "out/s")),
    ("disk", ("blocks", "hit/s", "in/s", "out/s")),
)
_WIDTH = 6

Told = Mapping[str, Any]


def watch(server: LiveServer, interval_s: float, *, count: int | None, json: bool) -> None:
    """A line every `interval_s` seconds, `count` of them or until interrupted."""
    before = server.get("/admin/api/stats")
    for turn in itertools.count():
        if turn == count:
            return
        time.sleep(interval_s)
        now = server.get("/admin/api/stats")
        if json:
            print_json_line(growth(before, now))
        else:
            if turn % HEADER_EVERY == 0:
                _print_header()
            typer.echo(_line(growth(before, now)))
        before = now


def growth(before: Told, now: Told) -> dict[str, Any]:
    """What went through each tier a second, and what clients got, between two snapshots."""
    elapsed_s = max(1e-3, now["time_s"] - before["time_s"])

    def rate(new: float, old: float) -> float:
        return round(max(0.0, new - old) / float(elapsed_s), 2)

    old_tiers = before["cache"]["tiers"]
    tiers = {
        name: {
            "num_blocks": tier["num_blocks"],
            "used_bytes": tier["used_bytes"],
            "hits_per_s": rate(tier["hits"], old_tiers[name]["hits"]),
            "stored_per_s": rate(tier["stored"], old_tiers[name]["stored"]),
            "evicted_per_s": rate(tier["evicted"], old_tiers[name]["evicted"]),
        }
        for name, tier in now["cache"]["tiers"].items()
    }
    old, new = before["traffic"], now["traffic"]
    prompt = {
        source: tokens - old["prompt_tokens"].get(source, 0.0)
        for source, tokens in new["prompt_tokens"].items()
    }
    total = sum(prompt.values())
    generated = rate(new.get("generation_tokens", 0.0), old.get("generation_tokens", 0.0))
    return {
        "time_s": now["time_s"],
        "running": now["engine"]["num_running"],
        "waiting": now["engine"]["num_waiting"] + now["engine"]["num_loading"],
        "tiers": tiers,
        "prompt_tokens_per_s": rate(total, 0.0),
        "hit_ratio": round(1 - prompt.get("computed", 0.0) / total, 4) if total else None,
        "generation_tokens_per_s": generated,
    }


def print_tiers(tiers: Told) -> None:
    """The tiers of a running server as a table; nothing where there is none."""
    if not tiers:
        return
    typer.echo("")
    print_table(
        ("tier", "blocks", "used", "of", "fill", "served", "stored", "evicted"),
        [
            (
                name,
                tier["num_blocks"],
                size(tier["used_bytes"]),
                size(tier["capacity_bytes"]),
                percent(tier["used_bytes"], tier["capacity_bytes"]),
                tier["hits"],
                tier["stored"],
                tier["evicted"],
            )
            for name, tier in tiers.items()
        ],
        right=("blocks", "used", "of", "fill", "served", "stored", "evicted"),
    )


def _print_header() -> None:
    groups = [f"{name:-^{(_WIDTH + 1) * len(columns) - 1}}" for name, columns in COLUMNS]
    typer.echo(" ".join(["-queue-", *groups, "------tokens-------"]))
    names = [f"{name:>{_WIDTH}}" for _, columns in COLUMNS for name in columns]
    typer.echo(" ".join(["run", "wai", *names, "prompt", "  hit", "output"]))


def _line(told: Told) -> str:
    cells = [f"{told['running']:>3}", f"{told['waiting']:>3}"]
    for name, columns in COLUMNS:
        tier = told["tiers"].get(name)
        keys = ("num_blocks", "hits_per_s", "stored_per_s", "evicted_per_s")
        cells += [f"{_short(tier[key]) if tier else '-':>{_WIDTH}}" for key in keys[: len(columns)]]
    ratio = told["hit_ratio"]
    cells.append(f"{_short(told['prompt_tokens_per_s']):>6}")
    cells.append(f"{'-' if ratio is None else f'{100 * ratio:.0f} %':>5}")
    cells.append(f"{_short(told['generation_tokens_per_s']):>6}")
    return " ".join(cells)


def _short(number: float) -> str:
    """At most five characters."""
    if number >= 1e6:
        return f"{number / 1e6:.1f}M"
    return f"{number / 1e3:.0f}k" if number >= 1e5 else f"{number:.0f}"
