"""/admin/api/cache over a running engine: pins, evictions, purges with a receipt that is proved."""

import time
from array import array
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from api.access.auth import Salts
from api.cache.explorer import Explorer
from api.cache.owners import Owners
from billing.reports.receipts import ReceiptSigner, verify_receipt
from billing.store.opening import database_url
from cachesvc.config.places import disk_path
from cachesvc.operator.operator import CacheOperator
from cachesvc.operator.purge import RECEIPTS
from cachesvc.operator.scopes import DAMAGED, note_scopes
from cachesvc.operator.secret import read_secret
from engine.engine import Engine
from engine.request import Request, SamplingParams
from engine.settings import EngineSettings
from tests.support.admin import OPERATOR_TOKEN, admin_client, fake_parts
from tests.support.billing import books_of, running_ledger
from tests.support.chain_runner import ChainRunner, chain_layout
from tests.support.wire import FakeHouse, fake_house
from tiers.blocks.chain import Chain
from tiers.cache import CacheSettings, TieredCache
from tiers.disk.open import open_disk
from tiers.disk.pin_file import load_pins
from tiers.disk.tier import DiskTier

BLOCK = 4
LAYOUT = chain_layout(BLOCK)
ORDER = {"name": "acme", "why": "the customer asked"}
PIN = {"name": "p", "for_s": 60, "why": "w", "tenant": "acme"}
HEADERS = {"Authorization": f"Bearer {OPERATOR_TOKEN}", "X-Cachesvc-Actor": "ada"}


@dataclass(slots=True)
class Running:
    """An engine on a disk tier of its own, and the operator's hands on it."""

    data_dir: Path
    house: FakeHouse
    engine: Engine
    cache: TieredCache
    cache_admin: CacheOperator
    signer: ReceiptSigner
    ended: set[str]

    def scope(self, tenant):
        model = next(iter(self.house.wire.inference.models.values()))
        return replace(model.scope, tenant=self.house.wire.access.salts.of_tenant(tenant))

    def serve(self, name, tokens, tenant="acme"):
        """Run a request to its end; the chain of its prompt."""
        params = SamplingParams(temperature=0, max_tokens=1)
        prompt = array("i", tokens)
        self.engine.submit(
            Request(request_id=name, tokens=prompt, params=params, scope=self.scope(tenant))
        )
        while name not in self.ended:
            self.engine.call(lambda cache: None).result(5)
        return Chain(self.scope(tenant).root(), tokens, BLOCK)

    def stands(self, chain):
        """How many leading blocks a later request would find above the disk."""
        return self.engine.call(lambda _: self.cache.peek(chain) // BLOCK).result(5)


@pytest.fixture
def running(tmp_path):
    house = fake_house(salts=Salts(read_secret(tmp_path)))
    note_scopes(tmp_path, house.wire.inference.models.values())
    ended = set()

    def take(outputs):
        last = [output for output in outputs if output.last]
        ended.update(output.request_id for output in last)

    disk = open_disk(disk_path(tmp_path), LAYOUT, 4 << 20)
    cache = TieredCache(
        LAYOUT,
        CacheSettings(device_bytes=40 * LAYOUT.nbytes, host_bytes=40 * LAYOUT.nbytes),
        disk=disk,
        pin_folder=disk_path(tmp_path),
    )
    engine = Engine(ChainRunner(cache.pool.tensor), cache, EngineSettings(), take)
    engine.start()
    signer = ReceiptSigner.open(tmp_path)
    cache_admin = CacheOperator(engine.call, engine.call, BLOCK, tmp_path, signer)
    try:
        yield Running(tmp_path, house, engine, cache, cache_admin, signer, ended)
    finally:
        engine.close()
        cache.close()
        house.close()


@pytest.fixture
async def client(running, trail):
    wire = running.house.wire
    owners = Owners(
        wire.inference.models, wire.access.salts, lambda: {"acme": "CNY", "bolt": "CNY"}
    )
    disk = running.cache.disk
    assert isinstance(disk, DiskTier)
    explorer = Explorer(running.engine.call, owners, disk.view, block_bytes=LAYOUT.nbytes)
    parts = fake_parts(cache=running.cache_admin, record=trail, explorer=explorer)
    async with admin_client(parts, running.house, path="/admin/", **HEADERS) as client:
        yield client


def pin_names(running):
    """Of those on disk."""
    return [pin.name for pin in load_pins(disk_path(running.data_dir))]


async def test_a_prefix_is_pinned_by_its_prompt_by_its_last_block_and_on_its_page(
    client, running, trail
):
    prompt = list(range(18))
    chain = running.serve("r1", prompt)
    key = chain.keys[3].hex()
    by_prompt = (await client.post("api/cache/pin", json={**PIN, "prompt": prompt})).json()
    body = {"name": "by-key", "for_s": 60, "why": "hot", "key": key}
    by_key = (await client.post("api/cache/pin", json=body)).json()
    form = {"name": "on-page", "for_s:hours": "1", "why": "hot", "key": key}
    pinned = await client.post("api/cache/pin", data=form)
    assert "<h1>Done</h1>" in pinned.text and "on-page" in pinned.text
    assert (by_prompt["num_tokens"], by_prompt["key"]) == (16, key)
    assert {by_key[name] for name in ("key", "scope")} == {key, chain.root.hex()}
    told = (await client.get("api/cache/pins")).json()
    names = ["p", "by-key", "on-page"]
    assert sorted(names) == sorted(pin["name"] for pin in told) == sorted(pin_names(running))
    (pin,) = [each for each in load_pins(disk_path(running.data_dir)) if each.name == "on-page"]
    assert (pin.scope, pin.num_tokens) == (chain.root, 16)
    assert 3600 == pytest.approx(pin.until_s - time.time(), abs=60)
    gone = await client.post("api/cache/unpin", json={"name": "p", "why": "done"})
    assert gone.json() == {"name": "p", "pinned": False}
    await client.post("api/cache/unpin", data={"name": "on-page", "why": "done"})
    assert ["by-key"] == pin_names(running)
    did = ["cache.pin"] * 3 + ["cache.unpin"] * 2
    assert trail.actions == [(action, "ada") for action in did]


@pytest.mark.parametrize(
    ("changed", "status", "says"),
    [
        ({"prompt": None}, 400, "one of"),
        ({"tenant": None}, 400, "Say whose"),
        ({"prompt": [1, 2]}, 400, "shorter than one block"),
        ({"prompt": None, "key": "0" * 32}, 404, "no prefix ends"),
        ({"model": "other"}, 404, "other"),
        ({"for_s": 0}, 400, "for_s"),
        ({"why": " "}, 400, "why"),
    ],
)
async def test_a_pin_that_cannot_be_set_is_explained(client, changed, status, says):
    body = PIN | {"prompt": list(range(9))}
    answer = await client.post("api/cache/pin", json=body | changed)
    assert answer.status_code == status and says in answer.text
    assert (await client.get("api/cache/pins")).json() == []
    missing = await client.post("api/cache/unpin", json={"name": "p", "why": "w"})
    assert missing.status_code == 404


async def test_a_purge_leaves_nothing_and_its_receipt_proves_it(client, running, trail):
    chain = running.serve("r1", list(range(18)))
    other = running.serve("r2", list(range(20, 38)), tenant="bolt")
    running.engine.call(lambda _: running.cache.flush()).result(5)
    await client.post("api/cache/pin", json={**PIN, "prompt": list(range(18))})
    signed = (await client.post("api/cache/purge", json=ORDER)).json()
    assert verify_receipt(signed, running.signer.public_key)
    assert not verify_receipt(signed | {"blocks_left": 1}, running.signer.public_key)
    assert signed["scopes"] == [chain.root.hex()]
    assert signed["tiers"]["disk"]["blocks"] == 4
    assert (signed["tenant"], signed["by"], signed["why"]) == ("acme", "ada", ORDER["why"])
    assert (signed["blocks_left"], signed["pins_ended"]) == (0, ["p"])
    assert (running.stands(chain), running.stands(other)) == (0, 4)
    assert pin_names(running) == []
    assert len(list((running.data_dir / RECEIPTS).iterdir())) == 1
    assert trail.entries[-1]["after"] == signed


async def test_nobody_is_purged_while_models_served_before_are_unknown(client, running, trail):
    """A receipt would say that nothing is left, and blocks of those models were not looked for."""
    chain = running.serve("r1", list(range(18)))
    (running.data_dir / f"{DAMAGED}-1").write_text("[")
    refused = await client.post("api/cache/purge", json=ORDER)
    assert (409, "purge_failed") == (refused.status_code, refused.json()["error"]["code"])
    assert f"{DAMAGED}-1" in refused.json()["error"]["message"]
    page = await client.post("api/cache/purge", data=ORDER, headers={"accept": "text/html"})
    assert (409, True) == (page.status_code, "restore" in page.text)
    assert running.stands(chain) == 4
    assert not trail.actions


@pytest.mark.parametrize("by_page", [False, True])
async def test_evicted_blocks_leave_every_tier(client, running, trail, by_page):
    """The page evicts what continues a block as well."""
    chain = running.serve("r1", list(range(18)))
    running.engine.call(lambda _: running.cache.flush()).result(5)
    keys = [key.hex() for key in chain.keys]
    if by_page:
        form = {"below": keys[0], "whole_run:yes": "no", "why": "w"}
        answer = await client.post("api/cache/evict", data=form)
        assert answer.status_code == 200 and '"disk": 4' in answer.text, answer.text
    else:
        answer = await client.post("api/cache/evict", json={"keys": keys, "why": "w"})
        assert answer.json() == {"removed": {"device": 4, "host": 4, "disk": 4}}
    entry = trail.entries[-1]
    assert entry["after"] == {"device": 4, "host": 4, "disk": 4}
    assert entry["subject"] == (keys[0] if by_page else "4 blocks")
    assert running.stands(chain) == 0


@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("purge", {"name": "amce", "why": "w"}),
        ("pin", {**PIN, "tenant": "amce", "prompt": [1] * 8}),
    ],
)
async def test_a_tenant_that_does_not_exist_is_neither_purged_nor_pinned_for(
    running, trail, route, body
):
    """A name mistyped must not get a receipt that says that nothing of it is left."""
    with running_ledger(database_url(running.data_dir)) as ledger:
        books = books_of(ledger, running.signer)
        parts = fake_parts(cache=running.cache_admin, record=trail, books=books)
        async with admin_client(parts, running.house, path="/admin/", **HEADERS) as client:
            answer = await client.post(f"api/cache/{route}", json=body)
            assert answer.status_code == 404
            assert "no tenant is named 'amce'" in answer.json()["error"]["message"]
            right = {key: "acme" if value == "amce" else value for key, value in body.items()}
            assert (await client.post(f"api/cache/{route}", json=right)).is_success


async def test_a_number_that_no_machine_counts_to_is_refused(client):
    """JSON has no bound on integers, and what writes the answer has."""
    far = 1 << 70
    days = await client.post("api/prices/plan", json={"toml": "", "days": far})
    asked = {"model": "bytes", "prompt": "a", "seed": far}
    quoted = await client.post("api/cache/quote", json={"request": asked})
    assert [400] * 2 == [answer.status_code for answer in (days, quoted)], days.text
