"""The pages of data over a real ledger and a real index: empty, filled, changed, refused."""

import re
import time
from functools import partial

import pytest
from starlette.datastructures import FormData

from api.access.auth import Salts
from api.admin.pages.format import hit_mark, marked, rounded
from api.admin.pages.forms import typed
from api.cache.explorer import Explorer
from api.cache.owners import Owners
from api.format import size
from api.journal.journal import Journal, JournalSettings
from billing.money import UNITS
from billing.reports.receipts import ReceiptSigner
from cachesvc.operator.lookups import read_blocks
from cachesvc.operator.operator import CacheOperator
from tests.api import test_money_routes
from tests.support.admin import OPERATOR_TOKEN, admin_client, called, fake_parts
from tests.support.chain_runner import chain_layout
from tests.support.wire import ByteTokenizer, byte_model
from tests.unit.test_tree import BLOCK, add
from tiers.cache import CacheSettings, TieredCache

books_of_acme = test_money_routes.house  # the fixture
SALTS = Salts(b"secret of the tests")
HTML = {"accept": "text/html", "authorization": f"Bearer {OPERATOR_TOKEN}"}
HELLO = list(b"Hello, you")
PAGES = ("requests", "explorer", "money", "tenants", "keys", "audit")

ACME = {"acme": "CNY"}


class Cache:
    """A cache whose index is filled by hand, and what looks into it for these tenants, each with
    its currency."""

    def __init__(self, tenants=ACME):
        layout = chain_layout(BLOCK)
        settings = CacheSettings(device_bytes=64 * layout.nbytes, host_bytes=64 * layout.nbytes)
        self.tiers = TieredCache(layout, settings)
        self.owners = Owners({"bytes": byte_model()}, SALTS, lambda: tenants)
        self.explorer = Explorer(self.call, self.owners, None, block_bytes=layout.nbytes)

    def call(self, function):
        return called(function, self.tiers.operations)

    def fill(self):
        """The key of the first block of acme's one prompt."""
        (root,) = self.owners.roots_of("acme")
        key = add(self.tiers.index, HELLO, root)[0].key
        assert key is not None
        return key


@pytest.fixture
def cache():
    return Cache()


@pytest.fixture
async def client(books_of_acme, cache, trail, tmp_path):
    parts = fake_parts(
        books=books_of_acme.books,
        explorer=cache.explorer,
        blocks=partial(read_blocks, cache.call),
        cache=CacheOperator(cache.call, cache.call, BLOCK, tmp_path, ReceiptSigner.open(tmp_path)),
        decode=ByteTokenizer().decode,
        record=trail,
    )
    async with admin_client(parts, path="/admin/", **HTML) as client:
        yield client


async def text(client, path, status=200):
    answer = await client.get(path)
    assert status == answer.status_code, answer.text
    return answer.text


async def done(client, path, **form):
    """The page that says what a form did. What it sends is what the form of a page has."""
    answer = await client.post(path, data={"why": "as agreed", **form})
    assert 200 == answer.status_code and "<h1>Done</h1>" in answer.text, answer.text
    assert "no-store" == answer.headers["cache-control"]
    return answer.text


NOTHING = [
    ("requests", 200, "No request yet"),
    ("explorer", 200, "Nothing is cached yet"),
    ("keys", 200, "There are no keys yet"),
    ("tenants?q=nobody", 200, "No tenant has this name"),
    ("audit?q=nothing-like-it", 200, "Nothing fits"),
    ("explorer/xyz", 400, "is not a key"),
    (f"explorer/{'0' * 32}", 404, "No tier holds the block"),
    ("requests/none", 404, "The journal has no request"),
    ("tenants/nobody", 404, "create it with <code>cachesvc tenants create nobody</code>"),
]


async def test_a_page_with_nothing_to_show_says_so(client):
    for path, status, words in NOTHING:
        assert words in await text(client, path, status)


async def test_pages_hold_neither_script_nor_style_of_their_own_and_load_only_ours(client, cache):
    cache.fill()
    pages = {name: await text(client, name) for name in (*PAGES, "tenants/acme", "login")}
    pages["nothing"] = await text(client, "nothing", 404)
    assert "That did not work" in pages["nothing"]
    for name, page in pages.items():
        assert not re.search(r"<script(?! src=)|<style|\sstyle=|\son\w+=", page), name
        assert [] == re.findall(r"(?:src|href)=\"(?!/|#|\?)", page), name


async def test_a_person_finds_the_dashboard_and_the_api_at_the_root_and_an_agent_a_server(client):
    assert 200 == (await client.head("http://test:8000/")).status_code
    led = await client.get("http://test:8000/")
    assert (307, "/admin") == (led.status_code, led.headers["location"])
    led = await client.get("http://test:8000/docs")
    assert (307, "/openapi.json") == (led.status_code, led.headers["location"])


async def test_the_explorer_shows_whose_a_prefix_is(client, cache):
    key = cache.fill().hex()
    page = await text(client, "explorer")
    assert "acme <small>bytes</small>" in page and key[:12] in page
    assert "<td>≥ " not in page
    chosen = await text(client, "explorer?tenant=acme")
    assert key[:12] in chosen
    assert 'name="confirm:none" required pattern="acme"' in chosen, "a purge needs its name again"
    assert "confirm" not in page
    assert "Nothing fits" in await text(client, "explorer?tenant=bolt")
    assert "No key begins with" in await text(client, "explorer?q=0000000000")
    found = await client.get(f"explorer?q={key[:10]}")
    assert (303, f"/admin/explorer/{key}") == (found.status_code, found.headers["location"])
    told = (await client.get("api/cache/tree")).json()
    assert ("acme", "bytes") == (told["scopes"][0]["owner"], told["scopes"][0]["model"])


async def test_a_short_end_is_counted_in_the_row_that_it_continues(client, cache):
    (root,) = cache.owners.roots_of("acme")
    long, short = list(range(8 * BLOCK)), list(range(2 * BLOCK))
    add(cache.tiers.index, [*long, *[1] * BLOCK], root)
    add(cache.tiers.index, [*long, *[2] * BLOCK], root)
    add(cache.tiers.index, [9, *short], root)
    page = await text(client, "explorer")
    assert 2 == page.count('<th scope="row" class="l'), "one row each, the ends are within"
    assert ">+2</a>" in page
    sorted_page = await text(client, "explorer?sort=tokens")
    first, second = re.findall(r"(\d+) blocks</small>", sorted_page)
    assert ("8", "3") == (first, second)
    assert f"<td>{10 * BLOCK}</td>" in sorted_page, "with both ends"


async def test_both_tables_of_the_page_count_a_partly_filled_block(client, cache):
    (root,) = cache.owners.roots_of("acme")
    add(cache.tiers.index, [*range(8 * BLOCK), 1], root)
    num_bytes = 9 * cache.explorer.block_bytes
    (room,) = (await client.get("api/cache/owners")).json()
    assert {"device": num_bytes} == room["bytes"]
    page = await text(client, "explorer")
    assert 2 <= page.count(f"<td>{size(num_bytes)}</td>")
    assert "/admin/explorer/None" not in page, "its row leads to the run's first block"


@pytest.mark.parametrize(("sort", "first"), [("tokens", 0), ("used", 1), ("hits", 1)])
async def test_prefixes_are_sorted_by_a_column(client, cache, sort, first):
    (root,) = cache.owners.roots_of("acme")
    blocks = [add(cache.tiers.index, [n] * n * BLOCK, root) for n in (5, 3)]
    blocks[1][0].hits = 7
    for block in blocks[0]:
        block.created_s -= 60
    page = await text(client, f"explorer?sort={sort}")
    keys = [found[0].key.hex()[:12] for found in blocks if found[0].key is not None]
    shown = re.findall(r'<th scope="row".*?<code>(\w+)</code>', page, re.DOTALL)
    assert keys == (shown if first == 0 else shown[::-1])
    assert 1 == page.count("aria-sort")


def outline(tokens):
    if tokens[0] == 1:
        return [("system", len(tokens))]
    return [("", 2), ("user", len(tokens) - 2)]


@pytest.mark.parametrize("keeps", [False, True])
async def test_a_row_shows_first_words_where_prompts_are_kept_and_else_roles_and_sizes(
    cache, keeps
):
    """A row that begins within a message continues its role."""
    cache.fill()
    (root,) = cache.owners.roots_of("acme")
    for ends in ([7] * 6, [8] * 6):
        add(cache.tiers.index, [1, 0, 0, 0, *ends], root)
    parts = fake_parts(
        journal=Journal(JournalSettings(keep_prompts=keeps)),
        explorer=cache.explorer,
        decode=ByteTokenizer().decode,
        outline=outline,
    )
    async with admin_client(parts, path="/admin/", **HTML) as client:
        page = await text(client, "explorer")
    assert keeps == ("Hello, you</small>" in page)
    assert (not keeps) == (">system 4</small>" in page)
    assert (0 if keeps else 2) == page.count(">… system 2, user 4</small>")


async def test_the_tenants_page_tells_bytes_by_tier(client, cache):
    assert ">Device</th>" not in await text(client, "tenants")
    cache.fill()
    page = await text(client, "tenants")
    assert ">Device</th>" in page
    assert size(len(HELLO) // BLOCK * cache.explorer.block_bytes) in page


async def test_a_page_of_many_prefixes_stays_small(client, cache):
    (root,) = cache.owners.roots_of("acme")
    for number in range(400):
        add(cache.tiers.index, [number, *HELLO], root)
    for path in ("explorer", "explorer?tenant=acme"):
        page = await text(client, path)
        assert len(page) < 110_000 and "more prefixes begin here" in page
        assert "<td>≥ " in page, "a sum of the rows shown is not the tenant's"


async def test_a_blocks_text_is_shown_when_an_admin_asks_and_is_audited(client, cache, trail):
    key = cache.fill().hex()
    assert "He</pre>" not in await text(client, f"explorer/{key}")
    assert [] == trail.actions
    shown = await client.post(f"explorer/{key}/text")
    assert "He</pre>" in shown.text
    assert ["block.read"] == [action for action, _ in trail.actions]


def forms_of(page):
    """The fields of each form of a page, by the route below /admin/api that it sends them to."""
    found = {}
    for form in re.findall(r'<form method="post".*?</form>', page, re.DOTALL):
        routes = re.findall(r'action="/admin/api/([^"]+)"', form)
        names = re.findall(r'(?:input|select)[^>]* name="([^"]+)"', form)
        found |= {route: set(names) - {"csrf_token"} for route in routes}
    return found


async def test_what_a_form_sends_fits_its_route(client, cache):
    """Each field is one that the route takes, and each that it needs is asked for."""
    key = cache.fill().hex()
    routes = (await client.get("http://test:8000/openapi.json")).json()
    await done(client, "api/budgets", tenant="acme", name="team", amount="5")
    await done(client, "api/cache/pin", key=key, name="p", **{"for_s:hours": "1"})
    await done(client, "api/keys", tenant="acme")
    pages = ("tenants", "tenants/acme", "keys", f"explorer/{key}", "explorer?tenant=acme")
    found = {}
    for page in pages:
        found |= forms_of(await text(client, page))
    paths = {
        re.sub(r"{\w+}", "[^/]+", path.removeprefix("/admin/api/")): each["post"]
        for path, each in routes["paths"].items()
        if path.startswith("/admin/api/") and "post" in each
    }
    for route, names in found.items():
        told = next(told for path, told in paths.items() if re.fullmatch(path, route))
        name = told["requestBody"]["content"]["application/json"]["schema"]["$ref"]
        schema = routes["components"]["schemas"][name.rpartition("/")[2]]
        sent = {re.split("[.:]", each)[0] for each in names if ":none" not in each}
        assert set(schema["required"]) <= sent <= set(schema["properties"]), route
    assert 17 == len(found), found


@pytest.mark.parametrize(
    ("sent", "document"),
    [
        ({"name": " team ", "value": ""}, {"name": "team"}),
        ({"limits.a:count": "5", "limits.b:count": ""}, {"limits": {"a": 5, "b": None}}),
        ({"scopes:each": ["", "usage", "read"]}, {"scopes": ["usage", "read"]}),
        ({"scopes:each": ""}, {"scopes": []}),
        ({"a:days": "7", "b:hours": "1.5", "c:days": ""}, {"a": 604_800, "b": 5400}),
        ({"a:yes": "yes", "b:yes": "no"}, {"a": True, "b": False}),
        ({"a:limit": "Unlimited", "b:limit": "5"}, {"a": None, "b": "5"}),
        ({"confirm:none": "acme", "csrf_token": "t", "why": "x"}, {"why": "x"}),
    ],
)
def test_what_is_typed_becomes_what_a_program_sends(sent, document):
    pairs = [
        (name, each)
        for name, value in sent.items()
        for each in (value if isinstance(value, list) else [value])
    ]
    assert document == typed(FormData(pairs))


async def test_a_deposit_is_booked_once_by_its_reference(client, books_of_acme):
    accounts, path = books_of_acme.books.accounts, "api/balance/acme/topup"
    before = accounts.tenant("acme").balance
    form = {"amount": "2.50", "reference": "INV-7", "expires": "", "why": "paid by bank"}
    for _ in range(2):
        await done(client, path, **form)
    assert "INV-7" in await text(client, "tenants/acme")
    assert before + int(2.5 * UNITS) == accounts.tenant("acme").balance
    assert "paid by bank" in await text(client, "audit?q=acme")
    pages = [await text(client, "tenants/acme") for _ in range(2)]
    offered = [re.findall(r'name="reference"[^>]* value="([^"]+)"', page) for page in pages]
    assert 4 == len({*offered[0], *offered[1]}), "each view of a page offers its own"


KEY, RATE = {"tenant": "acme", "scopes:each": "usage"}, "limits.requests:count"
REFUSED = [
    ("balance/acme/topup", {"amount": "ten"}, "not an amount of money"),
    ("balance/acme/topup", {}, "amount"),
    ("balance/acme/topup", {"amount": "3", "why": ""}, "why"),
    ("balance/acme/topup", {"amount": "3", "why": "-"}, "say why"),
    ("balance/acme/gift", {"amount": "3"}, "grant"),
    ("balance/acme/withdraw", {"amount": "3000"}, "insufficient"),
    ("tenants/acme/limit", {"credit_limit:limit": "lots"}, "not an amount of money"),
    ("tenants/acme/limit", {"credit_limit:limit": " "}, "credit_limit"),
    ("tenants/acme/rates", {RATE: "many"}, "is not a number"),
    ("tenants/acme/rates", {RATE: "9" * 13}, "less than or equal to 1000000000000"),
    ("tenants", {"tenant": "acme"}, "exists"),
    ("keys", KEY | {"scopes:each": ""}, "scopes"),
    ("keys", KEY | {"expires_in_s:days": "0"}, "greater than 0"),
    ("keys", KEY | {"expires_in_s:days": "²"}, "is not a number"),
    ("keys", KEY | {"expires_in_s:days": "inf"}, "is not a number"),
    ("keys", KEY | {"tenant": "nobody"}, "does not exist"),
    ("budgets", {"tenant": "bolt", "name": "team", "amount": "5"}, "another name"),
    ("cache/evict", {}, "one of"),
]


async def test_a_form_that_cannot_be_done_is_explained_on_a_page(client, books_of_acme):
    books_of_acme.books.accounts.create_tenant("bolt", "CNY", by="test")
    await done(client, "api/budgets", tenant="acme", name="team", amount="5")
    for path, form, words in REFUSED:
        answer = await client.post(f"api/{path}", data={"why": "x"} | form)
        assert 400 <= answer.status_code < 500, path
        assert re.search(f'role="alert">[^§]*{words}[^§]*</p>', answer.text), (form, answer.text)


async def test_a_header_that_decides_who_asks_is_sent_once(client):
    twice = [("authorization", f"Bearer {token}") for token in (OPERATOR_TOKEN, "other")]
    del client.headers["authorization"]
    refused = await client.post("api/tenants", data={"tenant": "n", "why": "x"}, headers=twice)
    assert 400 == refused.status_code and "was sent 2 times" in refused.text
    assert 400 == (await client.get("api/tenants", headers=twice)).status_code


async def test_budgets_have_forms(client):
    form = {"name": "team", "amount": "5", "per": "day", "of": "user", "value": "ann"}
    await done(client, "api/budgets", tenant="acme", **form)
    page = await text(client, "tenants/acme")
    assert "user ann" in page and "5.00 CNY left, until" in page
    await done(client, "api/budgets/team/remove")
    assert "user ann" not in await text(client, "tenants/acme")


async def test_a_key_is_shown_once_and_revoked(client, books_of_acme):
    form = {"tenant": "acme", "name": "laptop", "scopes:each": "inference"}
    made = await done(client, "api/keys", **form, **{"expires_in_s:days": "7"})
    key = re.search(r'<pre class="key"[^>]*>(sk-[^<]+)</pre>', made)
    assert key is not None
    assert "acme" == books_of_acme.books.accounts.authenticate(key[1]).tenant
    page = await text(client, "keys")
    assert key[1] not in page and key[1][:11] in page
    (info,) = books_of_acme.books.accounts.keys("acme")
    assert info.expires_ns is not None
    assert 7 * 86_400 * 10**9 == pytest.approx(info.expires_ns - time.time_ns(), abs=10**12)
    await done(client, f"api/keys/{info.key_id}/revoke")
    assert "revoked" in await text(client, "keys?state=revoked")


async def test_rate_limits_have_a_form(client, books_of_acme):
    accounts = books_of_acme.books.accounts
    limits_of = {"requests": "1", "miss_tokens": "20000", "output_tokens": "0"}
    form = {f"limits.{name}:count": number for name, number in limits_of.items()}
    await done(client, "api/tenants/acme/rates", **form)
    wanted = {"requests": 1, "miss_tokens": 20_000, "output_tokens": 0}
    assert wanted == accounts.rate_limits("acme")
    page = await text(client, "tenants/acme")
    assert re.search(r"Requests a minute</dt><dd>1 <small>set here", page)
    assert 'name="limits.miss_tokens:count"' in page and 'value="20000"' in page
    await done(client, "api/tenants/acme/rates", **dict.fromkeys(form, ""))
    assert {} == accounts.rate_limits("acme")


async def test_the_money_page_proves_and_sums(client):
    page = await text(client, "money")
    assert "Not proved since the server started" in page
    assert "0.0002 CNY</span></b> charged for 1 requests" in page
    assert "in force" in page and "standard" in page
    assert 303 == (await client.post("money/verify")).status_code
    assert "adds up" in await text(client, "money")


async def test_a_card_in_another_currency_leaves_the_money_page_in_that_of_the_charges(client):
    """Its charts were of the newest card's currency, empty, and its foot gave every card that."""
    body = {"card": {"name": "two-tier"}, "why": "dollars"}
    assert 200 == (await client.post("api/prices/apply", json=body)).status_code
    page = await text(client, "money")
    for currency in ("CNY", "USD"):
        assert f"<small>{currency} per million tokens</small>" in page
    assert "CNY an hour, by class of tokens" in page


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        *((hit_mark(hit, 100), mark) for hit, mark in ((2, "warn"), (50, ""), (98, "good"))),
        (hit_mark(100, 100), "good"),
        (rounded("0.0001617"), "0.000162"),  # in a tile as in a table
        (rounded("-0.0001617"), "-0.000162"),
        (rounded("24.9984463"), "24.9984"),
        (rounded("24.9999883"), "25.0000"),
        *((rounded(short), short) for short in ("0.00", "12.50", "7")),
        (marked("a <b> `c <d>`."), "a &lt;b&gt; <code>c &lt;d&gt;</code>."),
    ],
)
def test_a_value_is_shown_as_people_read_it(shown, expected):
    assert expected == shown
