"""What exact money costs: `python -m tests.bench.ledger [--entries 1000000]`.

Settlements a second, what a hold and a settlement add to a request with 32 concurrent clients, and
the time to prove and to state a ledger of a million entries; on SQLite, one process, the disk of
`--dir`.

Estimate before the first run, on one core: a settlement is some 40 us of Python (rate, body,
SHA-256, rows) and 20 us of SQLite (three B-trees), a commit 0.2 ms shared by its batch: 12,000 a
second. Alone, a hold is three reads and two writes at 10 us each, a begin and a commit that waits
for no disk, some 100 us of Python and two hand-offs between threads of 20 us: 0.25 ms. A settlement
is two more writes, the rating, one more hand-off and 0.15 to 0.25 ms of fdatasync: 0.6 ms. These
hold for a core that is awake: between requests it sleeps, and begins with empty caches. Proving
an entry is a JSON parse, a hash and a rating, 20 us: 20 s a million. A statement reads one row a
day, model and key: under 10 ms.
"""

import asyncio
import os
import sqlite3
import tempfile
import time
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import uvloop

from api.requests.metering import durable
from billing.accounts import Accounts
from billing.gate.commands import Deposit
from billing.gate.entries import Kind
from billing.gate.holds import RequestContext
from billing.gate.outcomes import Outcome
from billing.ledger import Ledger
from billing.money import UNITS
from billing.prices.cards import default_card
from billing.prices.rating import hold_amount
from billing.proof import audit
from billing.reports import statement as statements
from billing.store.opening import database_url, open_store
from billing.usage import Usage
from tests.bench.report import arguments, tell

CLIENTS = 32
# What a request takes besides, and so how many come: 120 tokens at 2 ms make 128 requests a second,
# and 640 are more than any one machine serves.
LOADS = {"usual": 0.25, "extreme": 0.05}
USAGE = Usage(hit_device=512, hit_disk=1024, miss=101, output=120)
WAVE = 4_096


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--entries", type=int, default=1_000_000)
    parser.add_argument("--dir", type=Path, help="on the disk to measure")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.dir) as folder:
        store = open_store(database_url(Path(folder)))
        store.renew_log()
        ledger = Ledger(store, Accounts(store), first_card=default_card())
        ledger.start()
        ledger.accounts.create_tenant("acme", "CNY", by="bench")
        ledger.post(
            Deposit("acme", Kind.TOPUP, amount=10**9 * UNITS, reference="d", by="bench")
        ).result()
        results: dict[str, Any] = {"load_average": os.getloadavg()[0]}  # what else was done
        results |= fill(ledger, options.entries)
        os.sync()  # what the filling left to write would be waited for by every commit
        results["latency"] = {
            load: with_ratio(
                on_loop(latency(ledger, load, request_s)) | on_loop(floor(Path(folder), request_s))
            )
            for load, request_s in LOADS.items()
        }
        results |= prove_and_state(ledger, options.entries)
        results["bytes_per_entry"] = _size(Path(folder)) // options.entries
        ledger.close()
        store.close()
    tell(results, options.json)


def on_loop(work: Coroutine[Any, Any, dict[str, float]]) -> dict[str, float]:
    """On the event loop that the server runs on."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(work)


async def latency(
    ledger: Ledger, load: str, request_s: float, rounds: int = 40
) -> dict[str, float]:
    """Milliseconds that hold and settlement add to a request, over all clients."""
    pinned = ledger.book.at("model", time.time_ns(), "CNY")
    amount = hold_amount(pinned, prompt_tokens=USAGE.prompt, output_tokens=256)
    holds: list[float] = []
    settles: list[float] = []

    async def client(number: int) -> None:
        await asyncio.sleep(request_s * number / CLIENTS)
        for turn in range(rounds):
            began = time.perf_counter()
            name = f"{load}{number}-{turn}"
            hold = await durable(ledger.reserve("acme", name, amount, pinned))
            held = time.perf_counter()
            await asyncio.sleep(request_s * (0.5 + (number * 7 + turn * 13) % 32 / 32))
            working = time.perf_counter()
            await durable(ledger.settle(hold, USAGE, Outcome.FINISHED))
            holds.append(held - began)
            settles.append(time.perf_counter() - working)

    await asyncio.gather(*(client(number) for number in range(CLIENTS)))
    both = sorted(a + b for a, b in zip(holds, settles, strict=True))
    return {
        "clients": CLIENTS,
        "requests_per_s": round(CLIENTS / request_s),
        "requests": len(both),
        "hold_ms_p50": _ms(sorted(holds), 0.50),
        "settle_ms_p50": _ms(sorted(settles), 0.50),
        "hold_and_settle_ms_p50": _ms(both, 0.50),
        "hold_and_settle_ms_p99": _ms(both, 0.99),
    }


def with_ratio(measured: dict[str, float]) -> dict[str, float]:
    """What can be compared between machines: in durable rows, of which 1 is the least."""
    ratio = measured["hold_and_settle_ms_p50"] / measured["one_durable_row_ms_p50"]
    return measured | {"hold_and_settle_in_durable_rows_p50": round(ratio, 2)}


async def floor(folder: Path, request_s: float, rounds: int = 600) -> dict[str, float]:
    """The same way without a ledger: a row of 300 bytes, handed to a thread with plain sqlite3."""
    connection = sqlite3.connect(folder / "floor", isolation_level=None, check_same_thread=False)
    connection.execute("PRAGMA journal_mode=WAL")
    connection.execute("PRAGMA synchronous=FULL")
    connection.execute("CREATE TABLE IF NOT EXISTS t (n INTEGER PRIMARY KEY, body TEXT)")
    took: list[float] = []

    def write() -> None:
        connection.execute("INSERT INTO t (body) VALUES (?)", ("x" * 300,))

    with ThreadPoolExecutor(1) as pool:
        for _ in range(rounds):
            await asyncio.sleep(request_s / CLIENTS)
            began = time.perf_counter()
            await asyncio.wrap_future(pool.submit(write))
            took.append(time.perf_counter() - began)
    connection.close()
    took.sort()
    return {"one_durable_row_ms_p50": _ms(took, 0.50), "one_durable_row_ms_p99": _ms(took, 0.99)}


def fill(ledger: Ledger, num_entries: int) -> dict[str, float]:
    """Settle until the ledger has `num_entries`, in waves; the rates of holds and settlements."""
    pinned = ledger.book.at("model", time.time_ns(), "CNY")
    holding = settling = 0.0
    done = 0
    while done < num_entries:
        began = time.perf_counter()
        futures = [
            ledger.reserve(
                "acme", f"f{done + i}", 10**9, pinned, context=RequestContext(key_id=f"k{i % 8}")
            )
            for i in range(WAVE)
        ]
        holds = [future.result() for future in futures]
        held = time.perf_counter()
        settled = [ledger.settle(hold, USAGE, Outcome.FINISHED) for hold in holds]
        for future in settled:
            future.result()
        holding += held - began
        settling += time.perf_counter() - held
        done += WAVE
    return {
        "holds_per_s": round(done / holding),
        "settlements_per_s": round(done / settling),
        "hold_and_settle_per_s": round(done / (holding + settling)),
    }


def prove_and_state(ledger: Ledger, num_entries: int) -> dict[str, Any]:
    began = time.perf_counter()
    proof = audit.verify(ledger.store)
    proved = time.perf_counter()
    assert proof.ok, proof.problems
    month = time.strftime("%Y-%m", time.gmtime())
    statement = statements.statement(ledger.store, "acme", month)
    stated = time.perf_counter()
    assert statement.requests == proof.num_entries - 1
    return {
        "entries": proof.num_entries,
        "verify_s": round(proved - began, 2),
        "statement_s": round(stated - proved, 4),
    }


def _ms(ordered: list[float], share: float) -> float:
    return round(ordered[int(share * (len(ordered) - 1))] * 1000, 3)


def _size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.iterdir())


if __name__ == "__main__":
    main()
