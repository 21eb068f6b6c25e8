"""A server under mixed load: its memory by owner, its descriptors and its threads.

    python -m tests.bench.soak [--requests 10000] [--warm-up 4000] [--each COUNT]

`cachesvc serve` on a tiny model with tiny tiers, so that everything turns over many times. The
kinds of requests are the functions in `KINDS`. Mixed, each request draws its kind. With `--each`,
every kind runs alone instead, and a row says what one request of it left behind.

`tests.bench.inside` tells what is allocated, what malloc keeps though it is free, and how many
objects Python has. The bounds in `NEAR` are lowered, so that what is bounded is full after the
warm-up. What grows from then on has no bound.
"""

import asyncio
import contextlib
import json
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx

from billing.money import UNITS
from cachesvc.server.server_file import find_server
from tests.bench.inside import ask
from tests.bench.report import arguments, tell
from tests.live_server import LiveServer
from tests.support.models import save_tiny_adapter, save_tiny_model

CLIENTS = 12
SETTLE_S = 2.0  # after the last answer, for what is written in the background
IDLE_S = 70.0  # after the last row: an idle server returns spare memory every minute
CHAT = "/v1/chat/completions"
SHARED = [f"You are assistant number {number}. " * 3 for number in range(8)]
# Bounds that ordinary load reaches after tens of thousands of requests: constants of modules, and
# defaults of classes.
NEAR = {
    "tiers.telemetry.misses:EvictedKeys.max_keys": 4096,
    "api.requests.turns:Conversations.max_tokens": 1 << 15,
    "cachesvc.server.kept_turns:KeptTurns.max_entries": 1024,
    "api.requests.responses:StoredResponses.max_bytes": 1 << 20,
    "api.requests.fingerprints:MAX_BYTES": 1 << 18,
    "billing.store.opening:CACHE_KIB": 256,
    "billing.store.store:LANE_CACHE_KIB": 1024,
}


class InsideServer(LiveServer):
    """A server that tells what is inside."""

    def command(self) -> list[Any]:
        inside = [sys.executable, "-m", "tests.bench.inside", self.socket, json.dumps(NEAR)]
        return [*inside, *super().command()[1:]]

    @property
    def socket(self) -> Path:
        return self.data_dir.parent / "inside.sock"

    def ask(self, question: str) -> Any:
        return ask(self.socket, question)


class Caller:
    """Sends requests. What it asks is drawn from its own dice."""

    def __init__(self, http: httpx.AsyncClient, operator: httpx.AsyncClient, seed: int) -> None:
        self.http, self.operator, self.dice = http, operator, random.Random(seed)
        self.last: str | None = None  # the response that the next one continues

    def words(self, number: int) -> str:
        return " ".join(str(self.dice.randrange(10_000)) for _ in range(number))

    async def chat(self, headers: Mapping[str, str] | None = None, **fields: Any) -> str:
        body = {"model": "tiny", "max_tokens": 6} | fields
        if "messages" not in body:
            body["messages"] = [{"role": "user", "content": self.words(8)}]
        return str((await self.http.post(CHAT, json=body, headers=headers)).status_code)


async def plain(caller: Caller) -> str:
    return await caller.chat()


async def shared(caller: Caller) -> str:
    text = caller.dice.choice(SHARED) + caller.words(4)
    return await caller.chat(messages=[{"role": "user", "content": text}])


async def stream(caller: Caller) -> str:
    return await caller.chat(stream=True, stream_options={"include_usage": True})


async def left(caller: Caller) -> str:
    """The client goes at a moment of its choice."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(caller.dice.random() * 0.3):
            return await caller.chat(max_tokens=60, stream=caller.dice.random() < 0.5)
    return "left"


async def regex(caller: Caller) -> str:
    """Another expression each time."""
    return await caller.chat(guided_regex=f"[a-z]{{2,{caller.dice.randrange(3, 400)}}}")


async def json_object(caller: Caller) -> str:
    return await caller.chat(response_format={"type": "json_object"})


async def schema(caller: Caller) -> str:
    """Another schema each time."""
    properties = {f"p{caller.dice.getrandbits(32)}": {"type": "integer"}}
    wanted = {"name": "one", "schema": {"type": "object", "properties": properties}}
    return await caller.chat(response_format={"type": "json_schema", "json_schema": wanted})


async def adapter(caller: Caller) -> str:
    return await caller.chat(model="tuned")


async def several(caller: Caller) -> str:
    return await caller.chat(n=3, temperature=1.0, seed=caller.dice.randrange(99))


async def tools(caller: Caller) -> str:
    """Another function each time."""
    function = {"name": f"f{caller.dice.getrandbits(32)}", "parameters": {"type": "object"}}
    choice = caller.dice.choice(["auto", "required"])
    return await caller.chat(tools=[{"type": "function", "function": function}], tool_choice=choice)


async def long(caller: Caller) -> str:
    return await caller.chat(messages=[{"role": "user", "content": caller.words(170)}])


async def too_long(caller: Caller) -> str:
    return await caller.chat(messages=[{"role": "user", "content": caller.words(20_000)}])


async def response(caller: Caller) -> str:
    """Stored, and continued from the one before."""
    body = {"model": "tiny", "input": caller.words(6), "max_output_tokens": 16}
    if caller.last is not None:
        body["previous_response_id"] = caller.last
    answer = await caller.http.post("/v1/responses", json=body)
    caller.last = answer.json().get("id") if caller.dice.random() < 0.7 else None
    return str(answer.status_code)


async def message(caller: Caller) -> str:
    """Anthropic's form, with a breakpoint."""
    text = {"type": "text", "text": caller.words(30), "cache_control": {"type": "ephemeral"}}
    turn = {"role": "user", "content": caller.words(8)}
    body = {"model": "tiny", "max_tokens": 4, "system": [text], "messages": [turn]}
    return str((await caller.http.post("/v1/messages", json=body)).status_code)


async def completion(caller: Caller) -> str:
    body = {"model": "tiny", "prompt": caller.words(8), "max_tokens": 4, "logprobs": 3}
    return str((await caller.http.post("/v1/completions", json=body | {"echo": True})).status_code)


async def tagged(caller: Caller) -> str:
    """Another user each time."""
    return await caller.chat(user=caller.words(3), metadata={"team": caller.words(2)})


async def refused(caller: Caller) -> str:
    """An unknown key, model, path or value, another one each time."""
    name = f"{caller.dice.getrandbits(64):x}"
    number = caller.dice.randrange(4)
    if number == 0:
        headers = {"Authorization": f"Bearer sk-{name}"}
        return str((await caller.http.get("/v1/models", headers=headers)).status_code)
    if number == 1:
        return str((await caller.http.get(f"/v1/{name}")).status_code)
    return await caller.chat(**({"model": name} if number == 2 else {"guided_regex": f"[{name}"}))


async def tenant(caller: Caller) -> str:
    """A new tenant with its key, its first deposit and its first request."""
    name = f"t{caller.dice.getrandbits(64):x}"
    why = {"why": "soak"}
    for path, body in (
        ("/admin/api/tenants", {"tenant": name, "currency": "CNY"}),
        (f"/admin/api/balance/{name}/topup", {"amount": "10", "reference": "first"}),
        ("/admin/api/keys", {"tenant": name}),
    ):
        made = await caller.operator.post(path, json=body | why)
        if made.is_error:
            return f"{path} {made.status_code}"
    headers = {"Authorization": f"Bearer {made.json()['key']}"}
    return await caller.chat(headers=headers)


async def metrics(caller: Caller) -> str:
    return str((await caller.http.get("/metrics")).status_code)


async def page(caller: Caller) -> str:
    """A page of the dashboard, or what it asks the server for."""
    pages = ("", "/money", "/cache", "/explorer", "/requests", "/tenants", "/keys", "/audit")
    data = ("/api/stats", "/api/history", "/api/cache/tree", "/api/usage", "/api/ledger")
    path = "/admin" + caller.dice.choice([*pages, *data])
    return str((await caller.operator.get(path)).status_code)


Kind = Callable[[Caller], Awaitable[str]]
KINDS: dict[str, Kind] = {
    each.__name__: each
    for each in (
        *(plain, shared, stream, left, regex, json_object, schema, adapter, several, tools, long),
        *(too_long, response, message, completion, tagged, refused, tenant, metrics, page),
    )
}


class Load:
    """Clients of one server. `seen` counts answers by kind and status."""

    def __init__(self, server: InsideServer, headers: dict[str, str]) -> None:
        self.server, self.seen = server, Counter[str]()
        live = find_server(server.data_dir)
        assert live is not None
        self._callers = [
            Caller(
                httpx.AsyncClient(base_url=server.url, headers=headers, timeout=120),
                httpx.AsyncClient(
                    base_url=server.url,
                    headers={"Authorization": f"Bearer {live.token}"},
                    timeout=120,
                ),
                seed,
            )
            for seed in range(CLIENTS)
        ]

    async def send(self, kinds: list[str], count: int) -> None:
        numbers = iter(range(count))
        await asyncio.gather(*(self._send(caller, kinds, numbers) for caller in self._callers))
        await asyncio.sleep(SETTLE_S)

    async def _send(self, caller: Caller, kinds: list[str], numbers: Iterator[int]) -> None:
        for _ in numbers:
            kind = caller.dice.choice(kinds)
            try:
                answer = await KINDS[kind](caller)
            except httpx.HTTPError as error:
                answer = type(error).__name__
            self.seen[f"{kind} {answer}"] += 1

    def row(self) -> dict[str, int]:
        """What the process takes now, in bytes and numbers."""
        process = Path(f"/proc/{self.server.pid}")
        return {
            "requests": self.seen.total(),
            **self.server.ask("figures"),
            "threads": sum(1 for _ in (process / "task").iterdir()),
            "descriptors": sum(1 for _ in (process / "fd").iterdir()),
        }


async def mixed(load: Load, kinds: list[str], warm_up: int, requests: int) -> dict[str, Any]:
    """The curve, with a row every twentieth part. Growth is by the line that fits the rows after
    the warm-up best."""
    await load.send(kinds, warm_up)
    rows = [load.row()]
    before = load.server.ask("objects")
    print(rows[-1], flush=True)
    for _ in range(20):
        await load.send(kinds, requests // 20)
        rows.append(load.row())
        print(rows[-1], flush=True)
    after = load.server.ask("objects")
    await asyncio.sleep(IDLE_S)
    idle = load.row()
    print(idle, flush=True)
    return {
        "bytes_a_request": {name: slope(rows, name) for name in ("anonymous", "allocated", "kept")},
        "objects_a_request": slope(rows, "objects"),
        "grown": grown(before, after),
        "rows": rows,
        "idle": idle,
        "trimmed": load.server.ask("trim"),
    }


async def each(load: Load, kinds: list[str], count: int) -> dict[str, Any]:
    """What a request of each kind leaves behind: half of them warm up."""
    found = {}
    for kind in kinds:
        await load.send([kind], count // 2)
        before, objects = load.row(), load.server.ask("objects")
        await load.send([kind], count - count // 2)
        after = load.row()
        found[kind] = {
            name: round((after[name] - before[name]) / (count - count // 2), 1)
            for name in ("anonymous", "allocated", "kept", "sqlite", "objects", "python_blocks")
        } | {"grown": grown(objects, load.server.ask("objects"))}
        print(kind, found[kind], flush=True)
    return found


def slope(rows: list[dict[str, int]], name: str) -> float:
    """Growth of `name` a request, by least squares."""
    requests, values = [row["requests"] for row in rows], [row[name] for row in rows]
    middle, mean = sum(requests) / len(rows), sum(values) / len(rows)
    product = sum((x - middle) * (y - mean) for x, y in zip(requests, values, strict=True))
    return round(product / sum((x - middle) ** 2 for x in requests), 2)


def grown(before: dict[str, int], after: dict[str, int]) -> dict[str, int]:
    """The ten types of which there are most objects more."""
    more = Counter({name: number - before.get(name, 0) for name, number in after.items()})
    return {name: number for name, number in more.most_common(10) if number > 0}


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--warm-up", type=int, default=4_000)
    parser.add_argument("--each", type=int, metavar="COUNT", help="every kind alone, so many times")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as ending:
        folder = Path(name)
        save_tiny_model(folder / "tiny")
        save_tiny_adapter(folder / "tuned", r=4, target_modules="all-linear")
        environment = {
            "CACHESVC_MODEL__ADAPTERS": json.dumps({"tuned": "tuned"}),
            "CACHESVC_JOURNAL__REQUESTS": "200",
            "PYTHONPATH": str(Path(__file__).parents[2]),
        }
        server = InsideServer(folder, folder / "tiny", **environment)
        headers = dict(server.customer("acme", 10**6 * UNITS))
        ending.callback(server.kill)
        server.start()
        load = Load(server, headers)
        if options.each:
            figures = asyncio.run(each(load, options.kinds, options.each))
        else:
            figures = asyncio.run(mixed(load, options.kinds, options.warm_up, options.requests))
        server.stop()
        errors = [line for line in server.log.splitlines() if '"error"' in line.lower()][:5]
    print(errors)
    tell({"answers": dict(load.seen), **figures}, options.json)


if __name__ == "__main__":
    main()
