"""Turns readings into the screen's content: pure functions over the admin routes' JSON."""

from collections.abc import Mapping, Sequence
from typing import Any

from api.format import percent, seconds, size
from cachesvc.observability.latency import percentile
from cachesvc.top.source import Reading
from tiers.tier import TierName

BARS = " ▁▂▃▄▅▆▇█"


TIER_COLUMNS = ("tier", "blocks", "used", "of", "fill", "hits/s", "in/s", "out/s", "idle p50")
SPARE = ("idle p50", "out/s", "in/s", "blocks")


def headline(reading: Reading) -> str:
    stats = reading.stats
    model = stats["model"].rstrip("/").rpartition("/")[2]
    return f"cachesvc {stats['version']}  {model}  {reading.url}  up {seconds(stats['uptime_s'])}"


def summary(reading: Reading, width: int = 200) -> list[str]:
    """Queues, traffic and latencies of the last minute. No figure is cut off at the edge."""
    engine, recent = reading.stats["engine"], reading.stats.get("recent", {})
    errors = sum(
        count
        for code, count in reading.stats["traffic"].get("responses", {}).items()
        if code.startswith(("4", "5"))
    )
    load = (
        f"running {engine['num_running']}  waiting {engine['num_waiting']}  "
        f"loading {engine['num_loading']}  preempted {engine['num_preemptions']}  "
        f"refused {errors:.0f}  holds {reading.stats['money']['num_holds']}"
    )
    times = [
        f"{name} " + "/".join(_ms(recent.get(f"{key}_{p}_s")) for p in ("p50", "p95", "p99"))
        for name, key in (("ttft", "ttft"), ("token", "inter_token"), ("request", "request"))
    ]
    load_lines = _folded(load, width)
    for each in engine.get("engines", ()):
        load_lines += _folded(_engine(each), width)
    whole = "ms at p50/p95/p99: " + "  ".join(times)
    if len(whole) <= width:
        return [*load_lines, whole]
    return [*load_lines, "ms at p50/p95/p99:", *(f"  {each}" for each in times)]


def _engine(use: Mapping[str, Any]) -> str:
    """A line of an engine at a URL."""
    tokens = use["prompt_tokens"]
    hits = f"{use['hit_tokens'] / tokens:.0%}" if tokens else "-"
    state = "up" if use["is_up"] else "DOWN"
    counts = f"in flight {use['num_in_flight']}  hits {hits}  errors {use['errors']}"
    return f"{use['model']}  {use['url']}  {state}  {counts}"


def _folded(text: str, width: int) -> list[str]:
    """Lines of at most `width`, broken between figures."""
    lines = [""]
    for part in text.split("  "):
        longer = f"{lines[-1]}  {part}" if lines[-1] else part
        if len(longer) <= width or not lines[-1]:
            lines[-1] = longer
        else:
            lines.append(part)
    return lines


def alarms(reading: Reading) -> list[str]:
    stats = reading.stats
    problems = []
    if stats["engine"].get("failed"):
        problems.append(f"the engine has failed: {stats['engine']['failed']}")
    engines = stats["engine"].get("engines", ())
    up = {each["model"] for each in engines if each["is_up"]}
    problems += [
        f"no engine of {model} answers: see ops/runbooks/engine-down.md"
        for model in dict.fromkeys(each["model"] for each in engines)
        if model not in up
    ]
    if stats["money"]["drift_units"]:
        problems.append("balances do not sum to the ledger: see ops/runbooks/ledger-drift.md")
    for name, count in stats["violations"].items():
        if count:
            problems.append(f"the invariant {name} is broken: see ops/runbooks/invariant-broken.md")
    return problems


def spark_lines(reading: Reading, width: int) -> list[str]:
    lines = []
    for name, values in reading.history.items():
        last = next((each for each in reversed(values) if each is not None), None)
        highest = 1.0 if name == "hit rate" else None
        course = sparkline(values, max(8, width - 23), highest)
        lines.append(f"{name:>12} {_value(name, last):>8} {course}")
    return lines


def sparkline(values: Sequence[float | None], width: int, highest: float | None = None) -> str:
    """The last `width` values as bars. A full bar is `highest`, or the maximum.

    A missing value is a gap.
    """
    shown = list(values[-width:])
    if highest is None:
        highest = max((each for each in shown if each is not None), default=0.0)
    if highest <= 0:
        return "".join(" " if each is None else BARS[1] for each in shown)
    top = len(BARS) - 1
    return "".join(
        " " if each is None else BARS[max(1, min(top, round(each / highest * top)))]
        for each in shown
    )


def tier_rows(reading: Reading, before: Reading | None) -> list[list[str]]:
    """One row per tier, hottest first, with rates since the previous reading."""
    rows = []
    for name in TierName:
        tier = reading.stats["cache"]["tiers"].get(name)
        if tier is None:
            continue
        old = before.stats["cache"]["tiers"].get(name, {}) if before is not None else {}
        elapsed_s = reading.at_s - before.at_s if before is not None else 0.0
        used, of = tier["used_bytes"], tier["capacity_bytes"]
        rates = [
            _rate(tier[key] - old.get(key, tier[key]), elapsed_s)
            for key in ("hits", "stored", "evicted")
        ]
        sizes = (str(tier["num_blocks"]), size(used), size(of), percent(used, of))
        rows.append([name, *sizes, *rates, _idle(tier)])
    return rows


def _rate(growth: float, elapsed_s: float) -> str:
    return f"{growth / elapsed_s:.3g}" if elapsed_s > 0 else "-"


def _ms(value_s: float | None) -> str:
    if value_s is None:
        return "-"
    return f"{value_s * 1e3:.0f}" if value_s >= 0.1 else f"{value_s * 1e3:.2g}"


def _idle(tier: Mapping[str, Any]) -> str:
    """How long evicted blocks had been unused."""
    idle = tier["lives"]["idle"]
    if not sum(idle["counts"]):
        return "-"
    return seconds(percentile(idle["counts"], 0.5, idle["bounds"]))


def _value(name: str, value: float | None) -> str:
    if value is None:
        return "-"
    if name == "hit rate":
        return percent(value, 1)
    return seconds(value) if name.startswith("ttft") else f"{value:.0f}"
