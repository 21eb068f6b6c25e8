"""What tenants keep: caches by name, breakpoints and sessions, as pins in real tiers; and what a
request would hit and cost."""

import time

import pytest

from api.requests.retention import MAX_SESSIONS, Retention
from billing.reports.receipts import ReceiptSigner
from cachesvc.operator.operator import CacheOperator
from engine.errors import QueueFull
from engine.request import BlockRun, Lookup
from tests.api.conftest import NamedGate, of, running
from tests.support.admin import called, error_of
from tests.support.chain_runner import chain_layout
from tests.support.wire import Script, fake_house
from tiers.cache import CacheSettings, TieredCache
from tiers.errors import MissReason

CACHES = "/v1/caches"
BLOCK = 16
LAYOUT = chain_layout(BLOCK)
SYSTEM = {"role": "system", "content": "You know the whole of the law, and say little. " * 4}
USER = {"role": "user", "content": "hi"}
BOLT = {"authorization": "bolt"}


class Clock:
    now_s = 1_000_000.0

    def __call__(self):
        return self.now_s


async def survey(job):
    return [{"device": 10, "disk": 6} for _ in job.prompts]


class Kitchen:
    """A wire whose engine is scripted, and whose pins are in a cache that is real."""

    def __init__(self, folder, num_blocks=400):
        self.clock = Clock()
        size = num_blocks * LAYOUT.nbytes
        settings = CacheSettings(device_bytes=size, host_bytes=size)
        self.cache = TieredCache(LAYOUT, settings, wall_clock=self.clock)
        operator = CacheOperator(self._call, self._call, BLOCK, folder, ReceiptSigner.open(folder))
        self.retention = Retention(operator, clock=self.clock)
        self.house = fake_house(gatekeeper=NamedGate(), retention=self.retention, survey=survey)

    def _call(self, function):
        return called(function, self.cache.operations)

    def pins(self, kind=""):
        return [pin for pin in self.cache.operations.pins() if kind in ("", pin.kind)]

    def wait(self, seconds):
        self.clock.now_s += seconds
        self.cache.step()


@pytest.fixture
def kitchen(tmp_path):
    return Kitchen(tmp_path)


@pytest.fixture
def house(kitchen):
    return kitchen.house


@pytest.fixture
async def client(house):
    """Acme's, unless a header says otherwise."""
    async with running(house) as (_, client):
        client.headers["authorization"] = "acme"
        yield client


def told(answer):
    """The answer's JSON."""
    assert 200 == answer.status_code, answer.text
    return answer.json()


async def keep(client, prompt, **body):
    return await client.post(CACHES, json={"model": "bytes", "prompt": prompt, **body})


async def turn(client, text, session="", **fields):
    """A chat of acme's with this system message and text."""
    messages = [SYSTEM, {"role": "user", "content": text}]
    body = {"model": "bytes", "messages": messages, "max_tokens": 4, **fields}
    headers = {"X-Session-Id": session} if session else {}
    told(await client.post("/v1/chat/completions", json=body, headers=headers))


async def test_a_cache_is_made_shown_changed_and_deleted(client, house, kitchen):
    body = {"model": "bytes", "name": "law", "ttl": "2h", "messages": [SYSTEM]}
    made = told(await client.post(CACHES, json=body))
    prompt = len(f"system: {SYSTEM['content']}\n")
    assert ("law", "cache", "bytes") == (made["id"], made["kind"], made["model"])
    assert prompt // BLOCK * BLOCK == made["num_tokens"]
    assert pytest.approx(time.time() + 7200, abs=60) == made["expires_at"]
    assert (prompt, 0) == (made["usage"]["prompt_tokens"], made["usage"]["completion_tokens"])
    assert 0 == house.engine.requests[-1].params.max_tokens
    [pin] = kitchen.pins("cache")
    assert ("acme", "acme:law") == (pin.owner, pin.name)
    assert kitchen.clock.now_s + 7200 == pytest.approx(pin.until_s, abs=60)
    assert ["law"] == [one["id"] for one in told(await client.get(CACHES))["data"]]
    told(await client.patch(f"{CACHES}/law", json={"ttl": 60}))
    [pin] = kitchen.pins("cache")
    assert pytest.approx(kitchen.clock.now_s + 60, abs=60) == pin.until_s
    gone = told(await client.delete(f"{CACHES}/law"))
    assert {"id": "law", "object": "cache", "deleted": True} == gone
    assert 404 == (await client.get(f"{CACHES}/law")).status_code
    assert [] == kitchen.pins()


async def test_a_cache_is_its_tenant_s_own(client, kitchen):
    told(await keep(client, "p" * 64, name="law"))
    client.headers.update(BOLT)
    assert [] == told(await client.get(CACHES))["data"]
    for method, asked in (("GET", None), ("PATCH", {"ttl": 60}), ("DELETE", None)):
        answer = await client.request(method, f"{CACHES}/law", json=asked)
        assert (404, "not_found") == error_of(answer)
    told(await keep(client, "p" * 64, name="law"))
    assert ["acme:law", "bolt:law"] == [pin.name for pin in kitchen.pins()]
    assert 2 == len({pin.scope for pin in kitchen.pins()})


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        *(({"ttl": ttl}, "ttl") for ttl in (59, "8d", "soon")),
        ({"name": "a/b"}, "name"),
        ({"prompt": None}, "messages"),
        ({"messages": [USER]}, "messages"),
        ({"cachesvc": {"share": "house"}}, "cachesvc"),
        ({"model": "none"}, "model"),
    ],
)
async def test_an_invalid_cache_request_names_the_field(client, kitchen, fields, param):
    answer = await client.post(CACHES, json={"model": "bytes", "prompt": "p" * 64, **fields})
    assert answer.status_code in (400, 404), answer.text
    assert param == answer.json()["error"]["param"]
    assert [] == kitchen.pins()


async def test_a_tenant_keeps_no_more_than_its_part_and_pays_nothing_for_what_is_refused(
    client, house, kitchen
):
    """100 of 400 blocks may be pinned, and one tenant leaves as many free as it keeps."""
    for name in ("one", "two"):
        told(await keep(client, name * (BLOCK * 5), name=name))
    num_asked = len(house.engine.requests)
    for prompt, said in (("x" * BLOCK * 100, "may keep 50 now"), ("tiny", "shorter than one")):
        answer = await keep(client, prompt, name="more")
        assert (409, "cache_not_kept") == error_of(answer)
        assert said in answer.json()["error"]["message"]
    assert num_asked == len(house.engine.requests)
    house.engine.script = Script(refuse=QueueFull("not now"))
    assert 503 == (await keep(client, "p" * 64)).status_code
    assert ["acme:one", "acme:two"] == [pin.name for pin in kitchen.pins()]


async def test_breakpoints_pin_what_lies_before_them(client, house, kitchen):
    """And the tokens written up to one of an hour are counted apart from the others."""
    lookup = Lookup((BlockRun(None, 0, 0, 0),), MissReason.ABSENT, block_size=BLOCK)
    house.engine.script = Script(answer="x", lookup=lookup)
    short, hour = {"type": "ephemeral"}, {"type": "ephemeral", "ttl": "1h"}
    parts = [{"type": "text", "text": "d" * 200, "cache_control": short}]
    parts.append({"type": "text", "text": "And this?"})
    body = {"model": "bytes", "max_tokens": 4, "messages": [{"role": "user", "content": parts}]}
    body["system"] = [{"type": "text", "text": SYSTEM["content"], "cache_control": hour}]
    usage = told(await client.post("/v1/messages", json=body))["usage"]
    system = len(f"system: {SYSTEM['content']}\n")
    document = system + len("user: ") + 200
    short, long = sorted(kitchen.pins("breakpoint"), key=lambda pin: pin.until_s)
    assert document // BLOCK * BLOCK == short.num_tokens
    assert [300, 3600] == [pin.until_s - kitchen.clock.now_s for pin in (short, long)]
    assert system // BLOCK * BLOCK <= long.num_tokens <= (system + len("user: ")) // BLOCK * BLOCK
    prompt = len(house.engine.requests[-1].tokens)
    assert usage["cache_creation"] == {
        "ephemeral_1h_input_tokens": long.num_tokens,
        "ephemeral_5m_input_tokens": prompt // BLOCK * BLOCK - long.num_tokens,
    }


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses"])
async def test_prompt_cache_retention_keeps_the_whole_prompt_for_a_day(
    client, house, kitchen, path
):
    field = "messages" if "chat" in path else "input"
    body = {"model": "bytes", field: [SYSTEM, USER], "prompt_cache_retention": "24h"}
    told(await client.post(path, json=body))
    [pin] = kitchen.pins("breakpoint")
    assert len(house.engine.requests[-1].tokens) // BLOCK == len(pin.keys)
    assert kitchen.clock.now_s + 86_400 == pin.until_s
    body["prompt_cache_retention"] = "for ever"
    answer = await client.post(path, json=body)
    assert 400 == answer.status_code
    assert "prompt_cache_retention" == answer.json()["error"]["param"]


async def test_a_session_is_kept_from_turn_to_turn_for_as_long_as_its_tenant_pauses(
    client, house, kitchen
):
    await turn(client, "one", "s1")
    [pin] = kitchen.pins("session")
    assert kitchen.clock.now_s + 60 == pin.until_s  # nothing is learned yet
    for _ in range(20):
        kitchen.clock.now_s += 20
        await turn(client, "one and more of it" * 3, "s1")
    [pin] = kitchen.pins("session")
    assert kitchen.clock.now_s + 25 == pytest.approx(pin.until_s)
    # The answer's blocks are kept with the prompt's.
    answered = len(house.engine.requests[-1].tokens) + 4
    assert answered // BLOCK == len(pin.keys)
    kitchen.wait(26)
    assert [] == kitchen.pins("session")


async def test_a_session_ends_with_the_request_that_says_so(client, kitchen):
    await turn(client, "one", "s1")
    assert 1 == len(kitchen.pins("session"))
    await turn(client, "hi", prompt_cache_key="s1", cachesvc={"pause_s": 0})
    assert [] == kitchen.pins("session")
    await turn(client, "hi", prompt_cache_key="s2", cachesvc={"pause_s": 1800})
    [pin] = kitchen.pins("session")
    assert kitchen.clock.now_s + 1800 == pin.until_s
    [kept] = (await client.get(CACHES)).json()["data"]
    assert "session" == kept["kind"]
    changed = await client.patch(f"{CACHES}/{kept['id']}", json={"ttl": 60})
    assert 400 == changed.status_code
    await client.delete(f"{CACHES}/{kept['id']}")
    assert [] == kitchen.pins("session")


async def test_a_parent_s_prefix_stays_while_its_children_run(client, kitchen):
    await turn(client, "the whole plan", "parent")
    [parent] = kitchen.pins("session")
    client.headers["X-Parent-Session-Id"] = "parent"
    for _ in range(5):
        kitchen.wait(50)
        await turn(client, "one part of it", "child")
    assert parent.keys in [pin.keys for pin in kitchen.pins("session")]
    kitchen.wait(61)
    assert [] == kitchen.pins("session")


async def test_sessions_without_end_cost_their_maker_alone(client, kitchen):
    """A tenant's new sessions push out its own old ones, not another's."""
    client.headers.update(BOLT)
    await turn(client, "hi", prompt_cache_key="mine")
    [theirs] = kitchen.pins("session")
    client.headers["authorization"] = "acme"
    for number in range(2 * MAX_SESSIONS):
        await turn(client, f"{number} " * 40, f"s{number}")
    standing = kitchen.pins("session")
    assert theirs in standing
    blocks = {key for pin in standing if pin.owner == "acme" for key in pin.keys}
    assert len(blocks) <= 50
    assert MAX_SESSIONS == len(kitchen.retention._tenants["acme"].ended)


QUOTE = "/v1/cache/quote"
ASKED = {"model": "bytes", "messages": [USER], "max_tokens": 5}
ASKED_TOKENS = len("user: hi\nassistant: ")


async def test_a_quote_computes_nothing_and_says_tokens_and_price(client, house):
    house.engine.script = Script(wait_s={"local": 0.25})
    quote = (await client.post(QUOTE, json=ASKED)).json()
    told = of(quote, "prompt_tokens", "hit_tokens", "miss_tokens", "hits_known")
    assert (ASKED_TOKENS, 16, ASKED_TOKENS - 16, True) == told
    assert {"device": 10, "host": 0, "disk": 6} == quote["hit_tokens_by_tier"]
    price = quote["price"]
    cost = f"{(16 + 10 * (ASKED_TOKENS - 16)) / 1e6:.6f}"
    assert (cost, "test", "standard") == of(price, "prompt", "card", "window")
    assert float(price["at_most"]) == pytest.approx(float(price["prompt"]) + 5 * 20 / 1e6)
    assert [] == house.engine.requests and [] == house.meter.charges


async def test_a_completion_is_quoted_too(client):
    body = {"model": "bytes", "prompt": "x" * 40}
    assert 40 == (await client.post(QUOTE, json=body)).json()["prompt_tokens"]
    answer = await client.post(QUOTE, json={"model": "bytes"})
    assert (400, "prompt") == (answer.status_code, answer.json()["error"]["param"])


@pytest.mark.parametrize("name", ["require_hit", "max_price"])
async def test_limits_of_one_request_are_refused_with_the_quote_to_ask(client, house, name):
    answer = await client.post("/v1/chat/completions", json=ASKED | {"cachesvc": {name: "1"}})
    error = answer.json()["error"]
    assert (400, "cachesvc") == (answer.status_code, error["param"])
    assert name in error["message"] and "POST /v1/cache/quote" in error["message"]
    assert [] == house.engine.requests and [] == house.meter.charges
