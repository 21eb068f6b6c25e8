"""`cachesvc top`: what the screen says of readings, and what its keys do, driven as a person would.

The picture in the README is this screen: the test below draws it and compares.
"""

import contextlib
import re
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from textual.widgets import DataTable, Static
from typer.testing import CliRunner

from cachesvc.cli import app as cli
from cachesvc.server.server_file import LiveError
from cachesvc.top import model
from cachesvc.top.app import HelpScreen, TopApp
from cachesvc.top.source import SPARKS, Reading

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
    stats = {
        "version": "0.1.0",
        "model": "smollm2-135m",
        "uptime_s": 11_100.0 + turn,
        "engine": {
            "num_running": 3,
            "num_waiting": 1,
            "num_loading": 1,
            "num_preemptions": 0,
            "failed": None,
        }
        | engine,
        "cache": {
            "tiers": {
                "device": tier("device", 0.96, GIB, hits=9000 + 120 * turn, stored=50 * turn),
                "host": tier("host", 0.71, 2 * GIB, hits=700 + 31 * turn, evicted=4 + 3 * turn),
                "disk": tier("disk", 0.22, 8 * GIB, hits=90 + 8 * turn),
            }
        },
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
    usage = [
        used("acme", 4000 + 7 * turn, 0.91),
        used("globex", 900 + turn, 0.34),
        used("initech", 120, 0.0),
    ]
    tenants = [{"tenant": name, "balance": "12.50"} for name in ("acme", "globex", "initech")]
    return Reading(
        "http://127.0.0.1:8000", stats, history, usage, tenants, at_s=1_795_239_810.0 + turn
    )


def used(tenant, requests, hit):
    prompt = requests * 2048
    return {
        "tenant": tenant,
        "currency": "CNY",
        "requests": requests,
        "prompt_tokens": prompt,
        "hit_tokens": int(prompt * hit),
        "output_tokens": requests * 80,
        "amount": f"{prompt * (1 - hit) / 1e6:.6f}",
        "saved": f"{prompt * hit * 0.9 / 1e6:.6f}",
    }


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


async def read(pilot, times=1):
    """Let the app read the server again, without waiting for its clock."""
    app = pilot.app
    assert isinstance(app, TopApp)
    for _ in range(times):
        await app.workers.wait_for_complete()
        app._read()
        await app.workers.wait_for_complete()
        await pilot.pause()


def text(app, place):
    return str(app.query_one(place, Static).content)


def column(app, place, number):
    table = app.query_one(place, DataTable)
    return [str(table.get_row_at(row)[number]) for row in range(table.row_count)]


def quiet(source):
    """An app that reads only when it is told to."""
    return TopApp(source, interval_s=3600)


@contextlib.asynccontextmanager
async def shown(source=None, *, times=1, size=(80, 24)):
    """The app on a terminal of this size, after so many readings."""
    app = quiet(source or Readings())
    async with app.run_test(size=size) as pilot:
        await read(pilot, times)
        yield app, pilot


@pytest.fixture
def anyio_backend():
    return "asyncio"


async def test_the_screen_tells_queues_tiers_tenants_and_rates():
    async with shown(times=2) as (app, _pilot):
        assert "cachesvc 0.1.0  smollm2-135m" in text(app, "#headline")
        assert "running 3  waiting 1  loading 1" in text(app, "#summary")
        assert "refused 3" in text(app, "#summary")
        assert "ttft 61/110/177" in text(app, "#summary")
        assert ["device", "host", "disk"] == column(app, "#tiers", 0)
        assert ["120", "31", "8"] == column(app, "#tiers", 5)
        assert "-" == column(app, "#tiers", 8)[2], "nothing has left the disk"
        assert ["acme", "globex", "initech"] == column(app, "#tenants", 0)
        assert ["7.0", "1.0", "0.0"] == column(app, "#tenants", 1)
        assert 4 == len(text(app, "#sparks").splitlines())
        table = app.query_one("#tenants", DataTable)
        widths = [each.get_render_width(table) for each in table.ordered_columns]
        assert sum(widths[:-1]) <= 80, "every column but the last is seen"
        assert all(len(line) <= 78 for line in text(app, "#summary").splitlines())


@pytest.mark.parametrize("size", [(80, 24), (40, 12), (200, 60), (20, 6)])
async def test_no_size_of_terminal_breaks_it(size):
    async with shown(times=2, size=size) as (app, pilot):
        await pilot.press("question_mark")
        assert isinstance(app.screen, HelpScreen)
        await pilot.press("x")
        assert not isinstance(app.screen, HelpScreen)
        for line in text(app, "#sparks").splitlines():
            assert len(line) <= max(32, size[0] - 2)


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
    assert first.endswith("DOWN  in flight 3  hits 75%  errors 2") and "hits -" in second
    assert any("no engine of big answers" in problem for problem in model.alarms(now))
    assert not any("no engine" in problem for problem in model.alarms(reading()))


async def test_paused_it_shows_what_it_showed():
    source = Readings()
    async with shown(source) as (app, pilot):
        await pilot.press("p")
        turn = source.turn
        await read(pilot)
        assert turn == source.turn
        assert "[paused]" in text(app, "#headline")
        await pilot.press("p")
        await read(pilot)
        assert turn + 1 == source.turn
        assert "[paused]" not in text(app, "#headline")


async def test_a_server_that_does_not_answer_is_told_and_asked_again():
    source = Readings()
    async with shown(source) as (app, pilot):
        source.down = True
        await read(pilot)
        assert "does not answer: refused; trying again" in text(app, "#alarm")
        assert app.query_one("#alarm").display
        assert "running 3" in text(app, "#summary"), "what was last known stays"
        source.down = False
        await read(pilot)
        assert not app.query_one("#alarm").display


async def test_what_must_be_known_at_once_is_on_top():
    def broken(turn):
        seen = reading(turn, failed="CUDA error")
        stats = {**seen.stats, "violations": {"ledger": 1}}
        return replace(seen, stats=stats | {"money": {"num_holds": 0, "drift_units": 5}})

    async with shown(Readings(broken)) as (app, _pilot):
        told = text(app, "#alarm")
        assert "the engine has failed: CUDA error" in told
        assert "ledger-drift.md" in told and "the invariant ledger is broken" in told


async def test_a_slow_server_is_asked_once_at_a_time():
    released = threading.Event()

    class Slow(Readings):
        def read(self):
            found = super().read()
            assert released.wait(10)
            return found

    source = Slow()
    app = quiet(source)
    async with app.run_test(size=(80, 24)) as pilot:
        for _ in range(5):
            app._read()
            await pilot.pause()
        assert 1 == source.turn
        released.set()
        await read(pilot)
        assert 2 == source.turn


async def test_a_narrow_screen_cuts_no_figure():
    """A long name pushed all figures out of 60 columns."""
    long = "customer-with-a-rather-long-name-of-its-own-"

    def named(turn):
        usage = [used(long + each, 900, 0.5) for each in "ab"]
        return replace(reading(turn), usage=usage, tenants=[])

    async with shown(Readings(named), times=2, size=(60, 30)) as (app, _):
        tenants, tiers = (app.query_one(place, DataTable) for place in ("#tenants", "#tiers"))
        for table in (tenants, tiers):
            assert table.virtual_size.width <= 60
        names = ["tenant", "requests", "hit", "cost", "balance"]
        assert names == [str(each.label) for each in tenants.ordered_columns]
        assert ["customer-…-its-own-a", "customer-…-its-own-b"] == column(app, "#tenants", 0)


async def test_the_picture_in_the_readme_is_this_screen(tmp_path):
    async with shown(times=2, size=(80, 20)) as (app, _pilot):
        drawn = picture(app.export_screenshot())
    found = PICTURE.read_text() if PICTURE.exists() else ""
    if drawn != found:
        fresh = Path("artifacts") / "top.svg"
        fresh.parent.mkdir(exist_ok=True)
        fresh.write_text(drawn)
    assert drawn == found, f"look at {fresh}, and copy it to {PICTURE} if it is right"


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
