"""`cachesvc top`: what the screen says of readings, and what its keys do.

The picture in the README is this screen: the test below draws it and compares.
"""

import io
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from cachesvc.cli import app as cli
from cachesvc.cli.top import Screen, watch  # noqa: F401  below, in a program of its own
from cachesvc.server.server_file import LiveError
from cachesvc.top import model
from cachesvc.top.source import SPARKS, Reading
from tests.terminal import on_a_terminal

NAMES = ("ttft", "inter_token", "request")
PICTURE = Path(__file__).parents[2] / "docs" / "images" / "top.svg"
GIB = 1 << 30
IDLE = {"bounds": [1, 60, 900, 3600], "counts": [0, 10, 80, 10, 0], "total": 0.0}


def tier(name, fill, capacity, **counters):
    used = int(fill * capacity)
    block = 2_949_120
    counts = {"hits": 0, "stored": 0, "evicted": 0} | counters
    lives = {"idle": IDLE if counts["evicted"] else {**IDLE, "counts": [0] * 5}}
    told = {"name": name, "num_blocks": used // block, "used_bytes": used, "lives": lives}
    return told | counts | {"capacity_bytes": capacity}


def reading(turn=0, **engine):
    """A busy server; each turn is a second later, with more of everything."""
    waiting = {"num_waiting": 1, "num_loading": 1}
    tiers = (
        tier("device", 0.96, GIB, hits=9000 + 120 * turn, stored=50 * turn),
        tier("host", 0.71, 2 * GIB, hits=700 + 31 * turn, evicted=4 + 3 * turn),
        tier("disk", 0.22, 8 * GIB, hits=90 + 8 * turn),
    )
    stats = {
        "version": "0.1.0",
        "model": "smollm2-135m",
        "uptime_s": 11_100.0 + turn,
        "engine": waiting | {"num_running": 3, "num_preemptions": 0, "failed": None} | engine,
        "cache": {"tiers": {each["name"]: each for each in tiers}},
        "traffic": {"responses": {"200": 5000.0, "402": 2.0, "503": 1.0}},
        "money": {"num_holds": 3, "drift_units": 0},
        "violations": {"blocks": 0},
        "recent": {
            f"{name}_{p}_s": base * factor
            for name, base in (("ttft", 0.061), ("inter_token", 0.041), ("request", 0.93))
            for p, factor in (("p50", 1.0), ("p95", 1.8), ("p99", 2.9))
        },
    }
    wave = [abs((n * 37) % 60 - 30) for n in range(120)]
    history = {
        "prompt tok/s": [each * 25.0 for each in wave],
        "hit rate": [None if each == 0 else 0.5 + each / 80 for each in wave],
        "ttft p95": [0.05 + each / 500 for each in wave],
        "output tok/s": [each * 1.5 for each in wave],
    }
    assert history.keys() == SPARKS.keys()
    return Reading("http://127.0.0.1:8000", stats, history, at_s=1_795_239_810.0 + turn)


class Readings:
    """A server whose next reading is the next of these, or an error."""

    def __init__(self, make=reading):
        self.turn = 0
        self.make = make
        self.down = False

    def read(self):
        if self.down:
            raise LiveError("the server at http://127.0.0.1:8000 does not answer: refused")
        self.turn += 1
        return self.make(self.turn)


def shown(source=None, *, times=1):
    """A screen after so many readings."""
    screen = Screen(source or Readings())
    for _ in range(times):
        screen.read()
    return screen


def drawn(screen, *, size=(80, 24)):
    """Its lines on a terminal of this size, and the console that has drawn them."""
    out = io.StringIO()
    console = Console(
        file=out, width=size[0], height=size[1], force_terminal=True, record=True, highlight=False
    )
    console.print(screen.drawn(console))
    return [line.rstrip() for line in console.export_text(clear=False).splitlines()], console


def row(lines, name):
    """The cells of the table's row that begins with `name`."""
    (found,) = (line for line in lines if line.startswith(f"{name} "))
    return re.split(r"\s{2,}", found)


@pytest.mark.parametrize("size", [(80, 24), (40, 12), (200, 60), (20, 6)])
def test_no_size_of_terminal_breaks_it(size):
    lines, _ = drawn(shown(times=2), size=size)
    assert max(map(len, lines)) <= size[0]


def test_at_80_columns_every_percentile_is_seen():
    """Also of a slow server, whose figures have more digits."""
    slow = {f"{name}_{p}_s": 123.456 for name in NAMES for p in ("p50", "p95", "p99")}
    now = reading()
    now = replace(now, stats={**now.stats, "recent": slow})
    lines = model.summary(now, 78)
    assert 3 == "\n".join(lines).count("123456/123456/123456")
    assert 78 >= max(map(len, lines))
    assert 2 == len(model.summary(reading(), 78))


def test_engines_at_urls_are_shown_and_an_alarm_tells_that_none_answers():
    use = {"model": "big", "url": "http://a:1", "is_up": False, "num_in_flight": 3, "errors": 2}
    uses = [use | {"prompt_tokens": 40, "hit_tokens": 30}, {**use, "prompt_tokens": 0}]
    now = reading()
    now = replace(now, stats={**now.stats, "engine": now.stats["engine"] | {"engines": uses}})
    first, second = (line for line in model.summary(now) if "http" in line)
    assert "big  http://a:1  DOWN  in flight 3  hits 75%  errors 2" == first and "hits -" in second
    assert any("no engine of big answers" in problem for problem in model.alarms(now))
    assert not any("no engine" in problem for problem in model.alarms(reading()))


def test_paused_it_shows_what_it_showed():
    source = Readings()
    screen = shown(source)
    assert screen.press("p")
    screen.read()
    assert 1 == source.turn
    assert "[paused]" in drawn(screen)[0][0]
    assert screen.press(" ")
    screen.read()
    assert 2 == source.turn
    assert "[paused]" not in drawn(screen)[0][0]


def test_a_server_that_does_not_answer_is_told_and_asked_again():
    source = Readings()
    screen = shown(source)
    source.down = True
    screen.read()
    lines, _ = drawn(screen)
    assert lines[1].endswith("does not answer: refused; trying again")
    assert "running 3" in lines[2], "what was last known stays"
    source.down = False
    screen.read()
    assert "trying again" not in "".join(drawn(screen)[0])


def test_what_must_be_known_at_once_is_on_top():
    def broken(turn):
        seen = reading(turn, failed="CUDA error")
        stats = {**seen.stats, "violations": {"ledger": 1}}
        return replace(seen, stats=stats | {"money": {"num_holds": 0, "drift_units": 5}})

    lines, _ = drawn(shown(Readings(broken)))
    assert "the engine has failed: CUDA error" == lines[1]
    assert "ledger-drift.md" in lines[2] and "the invariant ledger is broken" in lines[3]


def test_a_narrow_screen_cuts_no_figure():
    lines, _ = drawn(shown(times=2), size=(45, 30))
    assert max(map(len, lines)) <= 45
    assert ["tier", "used", "of", "fill", "hits/s"] == row(lines, "tier")
    assert 5 == len(row(lines, "device")) == len(row(lines, "host"))


def test_keys_reach_it_and_it_leaves_the_terminal_as_it_was():
    program = "from tests.unit.test_top import *; watch(Readings(), 3600); print(input('left'))"
    with on_a_terminal([sys.executable, "-c", program], Path(__file__).parents[2]) as terminal:
        terminal.read_until("device")
        terminal.type("p")
        terminal.read_until("[paused]")
        terminal.type("q")
        terminal.read_until("left")
        terminal.type("a line\n")
        terminal.read_to_end()
        assert 0 == terminal.process.wait()
    assert 2 == terminal.written.count("a line"), "echoed again, and read as a whole"


def test_the_picture_in_the_readme_is_this_screen():
    _, console = drawn(shown(times=2), size=(80, 20))
    drawn_now = picture(console.export_svg(title="cachesvc top"))
    found = PICTURE.read_text() if PICTURE.exists() else ""
    if drawn_now != found:
        fresh = Path("artifacts") / "top.svg"
        fresh.parent.mkdir(exist_ok=True)
        fresh.write_text(drawn_now)
    assert drawn_now == found, f"look at {fresh}, and copy it to {PICTURE} if it is right"


def picture(svg):
    """The screen without fonts from elsewhere, and the same in every run."""
    svg = re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL)
    return re.sub(r"terminal-\d+", "terminal", svg)


def test_bars_rise_with_values_and_leave_gaps():
    assert "▁▄█ ▁" == model.sparkline([0, 5, 10, None, 0.1], 10)
    assert "▁▁" == model.sparkline([7, 0, 0], 2)
    assert "▄" == model.sparkline([0.5], 4, highest=1.0)


def test_without_a_server_it_says_what_to_do(tmp_path):
    failed = CliRunner().invoke(cli, ["top", "--data-dir", str(tmp_path)])
    assert 1 == failed.exit_code
    assert f"no server runs on {tmp_path}; start one with `cachesvc serve`" in failed.stderr
