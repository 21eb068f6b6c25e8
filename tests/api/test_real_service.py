"""The service as `serve` builds it, in process over tiny models: what a hit bills and a restart
keeps, tenants' salts, purges, the promise under which a request was served, readiness.
"""

import asyncio
import logging
import re
import sqlite3
from contextlib import closing

import anyio
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from cachesvc.cli.explain import _request_lines
from cachesvc.config.places import states_path
from cachesvc.operator.purge import RECEIPTS
from cachesvc.server.kept_turns import FILE_NAME
from engine.errors import ModelError
from engine.models import load
from engine.promise import BITS, Equal
from engine.request import FinishReason
from tests.api.real_service import served
from tests.parity import architectures
from tests.support.models import save_model, stock_model
from tiers.disk.inspection.opening import open_shards
from tiers.errors import FAULTS

pytestmark = pytest.mark.timeout(300)
BLOCK = 16
PROMPT = [number * 7 % 250 for number in range(150)]
END = 144  # the last block's end before the prompt's
LETTERS = {  # what a model of random bytes says is seldom text
    "type": "json_schema",
    "name": "letters",
    "schema": {"type": "string", "pattern": "^[a-z]{40}$"},
}
SAID = [{"role": "user", "content": "hi"}]


@pytest.fixture
def data_dir(tmp_path):
    return tmp_path / "data"


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory):
    """A tiny Qwen3-Next as users have it on disk."""
    logging.getLogger("transformers").setLevel(logging.ERROR)  # of kernels that are not installed
    folder = tmp_path_factory.mktemp("models") / "hybrid"
    save_model(folder, architectures.stock("qwen3_next"))
    return folder


async def ask(client, model, prompt=PROMPT, **fields):
    """The whole answer."""
    body = {"model": str(model), "prompt": prompt, "max_tokens": 4, "temperature": 0} | fields
    answer = await client.post("/v1/completions", json=body)
    assert 200 == answer.status_code, answer.text
    told = answer.json()
    assert isinstance(prompt, str) or told["usage"]["prompt_tokens"] == len(prompt)
    return told


def hits(answer):
    """Tokens by the tier that served them."""
    by_tier = answer["usage"]["prompt_tokens_details"]["cached_tokens_details"]
    return {tier: tokens for tier, tokens in by_tier.items() if tokens}


def operator(service):
    return {"authorization": f"Bearer {service.dashboard.parts.operator_token}"}


async def purge(client, service, status=200):
    """What the purge of the tenant without a key is answered."""
    order = {"kind": "tenant", "name": "default", "why": "the customer asked"}
    answer = await client.post("/admin/api/cache/purge", json=order, headers=operator(service))
    assert status == answer.status_code, answer.text
    return answer.json()


def num_checkpoints(data_dir):
    """On disk, without the server."""
    with open_shards(states_path(data_dir), readonly=True) as (_, shards):
        return sum(shard.read_totals().num_blocks for shard in shards)


async def test_hits_are_billed_by_tier_and_come_back_from_disk(data_dir, hybrid):
    async with served(data_dir, hybrid) as (_, client):
        cold, warm = await ask(client, hybrid), await ask(client, hybrid)
        assert [{}, {"device": END}] == [hits(cold), hits(warm)]
        await ask(client, hybrid, [*PROMPT[:100], 1, 2, 3])
        assert {"device": 96} == hits(await ask(client, hybrid, [*PROMPT[:100], 3, 2, 1]))
        shown = (await client.get("/metrics")).text
        (count,) = re.findall(r'^cachesvc_checkpoints\{tier="device"\} (\d+)', shown, re.MULTILINE)
        assert 0 < int(count)
    async with served(data_dir, hybrid) as (_, client):
        again = await ask(client, hybrid)
        assert {"disk": END} == hits(again)
        assert cold["choices"] == warm["choices"] == again["choices"]


async def test_a_purge_leaves_no_checkpoint_in_memory_or_on_disk(data_dir, hybrid):
    async with served(data_dir, hybrid) as (service, client):
        await ask(client, hybrid)
        await ask(client, hybrid, [*PROMPT[:100], 1, 2, 3])
        cache = service.core.cache
        service.core.engine.call(lambda _: cache.flush()).result(10)
        signed = await purge(client, service)
        assert 0 == signed["blocks_left"]
        held = len(cache.group.index), cache.group.disk.stats().num_blocks
        assert (0, 0) == held
        counts = {tier: gone["count"] for tier, gone in signed["checkpoints"].items()}
        assert counts["device"] == counts["disk"] >= 2
        assert {} == hits(await ask(client, hybrid))
        assert {"device": END} == hits(await ask(client, hybrid))


async def test_a_purge_reaches_a_disk_tier_that_is_turned_off(data_dir, hybrid):
    """Turned on again, it would serve what the receipt says is gone."""
    async with served(data_dir, hybrid) as (_, client):
        await ask(client, hybrid)
    held = num_checkpoints(data_dir)
    off = {"cache_disk_bytes": 0}
    async with served(data_dir, hybrid, **off) as (service, client):
        assert {} == hits(await ask(client, hybrid))
        signed = await purge(client, service)
        assert END // BLOCK == signed["tiers"]["disk"]["blocks"]
        assert held == signed["checkpoints"]["disk"]["count"] > 0
    async with served(data_dir, hybrid) as (_, client):
        assert {} == hits(await ask(client, hybrid))


async def test_another_model_leaves_no_checkpoint_behind(data_dir, hybrid, tiny):
    """A model without recurrent states could neither use them nor purge them."""
    async with served(data_dir, hybrid) as (_, client):
        await ask(client, hybrid)
    assert num_checkpoints(data_dir)
    async with served(data_dir, tiny) as (_, client):
        await ask(client, tiny)
    assert [] == list(states_path(data_dir).glob("shard-*"))
    async with served(data_dir, hybrid) as (_, client):
        assert {} == hits(await ask(client, hybrid))


async def test_salts_share_no_block_and_are_purged_with_their_tenant(data_dir, tiny):
    """Blocks apart within a tenant, and still the tenant's to purge."""
    ways = [{}, {"cache_salt": "a"}, {"cache_salt": "b"}, {"user_id": "a"}]
    async with served(data_dir, tiny) as (service, client):

        async def cached():
            found = [hits(await ask(client, tiny, max_tokens=1, **fields)) for fields in ways]
            return [sum(each.values()) for each in found]

        assert [0, 0, 0, 0] == await cached()
        assert [len(PROMPT) - 1] * 4 == await cached()
        assert 0 == (await purge(client, service))["blocks_left"]
        assert [0, 0, 0, 0] == await cached()


async def test_a_purge_leaves_nothing_of_a_running_request(data_dir, tiny):
    body = {"model": str(tiny), "messages": SAID, "max_tokens": 900, "ignore_eos": True}
    async with served(data_dir, tiny) as (service, client):
        engine = service.core.engine
        asked = asyncio.create_task(client.post("/v1/chat/completions", json=body))
        while not engine.stats().num_running:
            await asyncio.sleep(0.001)
        await purge(client, service)
        assert not asked.done()
        [running_id] = engine._intake._in_flight
        engine.abort(running_id, FinishReason.LENGTH)
        answer = await asked
        assert (200, "length") == (answer.status_code, answer.json()["choices"][0]["finish_reason"])
        assert 0 == engine.stats().cache.device.num_blocks
    with closing(sqlite3.connect(data_dir / FILE_NAME)) as file:
        assert [(0,)] == file.execute("SELECT count(*) FROM kept").fetchall()


async def test_a_purge_that_cannot_remove_stored_turns_gives_no_receipt(data_dir, tiny):
    """It was signed while the removal waited for a thread that would have failed."""
    body = {"model": str(tiny), "messages": SAID, "max_tokens": 2}
    async with served(data_dir, tiny) as (service, client):
        with closing(sqlite3.connect(data_dir / FILE_NAME, isolation_level=None)) as file:

            def num_stored() -> int:
                return int(file.execute("SELECT count(*) FROM kept").fetchone()[0])

            assert 200 == (await client.post("/v1/chat/completions", json=body)).status_code
            while not num_stored():
                await asyncio.sleep(0.01)
            file.execute(
                "CREATE TRIGGER full BEFORE DELETE ON kept "
                "BEGIN SELECT RAISE(ABORT, 'disk is full'); END"
            )
            error = (await purge(client, service, 409))["error"]
            assert "purge_failed" == error["code"] and "disk is full" in error["message"]
            assert not (data_dir / RECEIPTS).exists()
            file.execute("DROP TRIGGER full")
            await purge(client, service)
            assert 0 == num_stored()


async def test_a_conversation_goes_on_after_a_restart_from_the_tokens_it_was_left_in(
    data_dir, tiny
):
    before = {}
    for number in range(2):
        async with served(data_dir, tiny) as (_, client):
            asked = {"model": str(tiny), "input": f"Question {number}: tell me all of it, please."}
            asked |= {"text": {"format": LETTERS}, "temperature": 0}
            asked |= {"previous_response_id": before["id"]} if before else {}
            answer = (await client.post("/v1/responses", json=asked)).json()
            if before:
                left = before["usage"]["input_tokens"] + before["usage"]["output_tokens"]
                cached = answer["usage"]["input_tokens_details"]["cached_tokens"]
                # All but the last block, of which some was generated and never computed.
                assert cached >= left - 2 * BLOCK > before["usage"]["input_tokens"]
            before = answer
    path = f"/v1/responses/{before['id']}"
    async with served(data_dir, tiny) as (_, client):
        assert before["id"] == (await client.get(path)).json()["id"]
        assert (await client.delete(path)).json()["deleted"]
        assert 404 == (await client.get(path)).status_code


async def test_a_cache_is_kept_over_a_restart_quoted_and_hit(data_dir, tiny):
    law = "The law of the land is long, and this is how it begins. " * 4
    asked = {"model": str(tiny), "prompt": law + "And then?", "max_tokens": 1}
    kept = {"model": str(tiny), "prompt": law, "ttl": "1h"}
    async with served(data_dir, tiny) as (_, client):

        async def quoted():
            return (await client.post("/v1/cache/quote", json=asked)).json()

        quote = await quoted()
        assert (0, quote["prompt_tokens"]) == (quote["hit_tokens"], quote["miss_tokens"])
        assert 0 < float(quote["price"]["prompt"]) <= float(quote["price"]["at_most"])
        made = (await client.post("/v1/caches", json=kept | {"name": "law"})).json()
        assert made["num_tokens"] >= BLOCK
    async with served(data_dir, tiny) as (_, client):
        found = (await client.get("/v1/caches/law")).json()
        assert [made[name] for name in ("id", "num_tokens")] == [found["id"], found["num_tokens"]]
        assert abs(made["expires_at"] - found["expires_at"]) <= 2 and str(tiny) == found["model"]
        below = (await quoted())["hit_tokens_by_tier"]
        assert (0, 0) == (below["device"], below["host"]) and below["disk"] >= made["num_tokens"]
        await client.post("/v1/caches", json=kept | {"name": "again"})
        above = (await quoted())["hit_tokens_by_tier"]
        assert {"device": below["disk"], "host": 0, "disk": 0} == above, "it is warmed"
        assert sum(hits(await ask(client, tiny, law + "And then?")).values()) >= made["num_tokens"]
        for name in ("law", "again"):
            assert (await client.delete(f"/v1/caches/{name}")).json()["deleted"]
        assert [] == (await client.get("/v1/caches")).json()["data"]


async def test_a_restart_loses_no_request_that_an_admin_saw(data_dir, tiny):
    async with served(data_dir, tiny) as (_, client):
        answer = await ask(client, tiny, "Call me Ishmael. " * 8)
    request_id = answer["id"].removeprefix("cmpl-")
    async with served(data_dir, tiny) as (service, client):
        client.headers.update(operator(service) | {"accept": "text/html"})
        assert request_id[:8] in (await client.get("/admin/requests")).text
        faults = (await client.get("/admin/cache")).text
        assert all(f"tiers.disk.faults.{reason}" in faults for reason in FAULTS)
        assert 200 == (await client.get(f"/admin/requests/{request_id}")).status_code


async def test_a_request_is_shown_with_the_promise_under_which_it_was_served(tmp_path, tiny):
    first, told = await shown(tmp_path, tiny)
    assert told["exactness"] == {"equal": "bits", "text": BITS.text}
    assert told["exactness"]["text"] in _request_lines(told)[-1]

    other, told = await shown(tmp_path, tiny, model_dtype="float16")
    assert told["exactness"]["equal"] == Equal.TOKENS
    assert "Linear are not packed" in told["exactness"]["text"]
    async with served(tmp_path / "data", tiny) as (service, client):
        client.headers.update(operator(service))
        pages = [await client.get(f"/admin/requests/{each}") for each in (first, other)]
    assert "equal bits" in pages[0].text and BITS.text in pages[0].text
    assert "equal tokens" in pages[1].text and "Greedy tokens are equal" in pages[1].text


@pytest.mark.parametrize("compiled", [True, False])
async def test_bits_are_promised_to_many_threads_where_operators_are_compiled(
    tmp_path, operators, monkeypatch, compiled
):
    """torch cuts 511 rows of 160 numbers into three shares, whose ends are not its vectors'."""
    model = LlamaForCausalLM(
        LlamaConfig(**stock_model().config.to_dict() | {"intermediate_size": 160})
    )
    folder = tmp_path / "wide"
    save_model(folder, model)
    monkeypatch.setattr(load, "_COMPILED_FROM_BYTES", 0 if compiled else 1 << 40)
    monkeypatch.setattr(load, "Operators", lambda *folders: operators)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        _, told = await shown(tmp_path, folder)
        assert told["exactness"]["equal"] == (Equal.BITS if compiled else Equal.TOKENS)
        if not compiled:
            torch.set_num_threads(3)  # the engine had no more than there are processors
            with pytest.raises(ModelError, match="activations of 160 numbers depend"):
                await shown(tmp_path, folder, model_exact="always")
    finally:
        torch.set_num_threads(before)


async def shown(folder, model, **settings):
    """The id of a request that a server answered, and what it says of it."""
    async with served(folder / "data", model, **settings) as (_, client):
        answer = await ask(client, model, "Call me Ishmael. ")
        told = (await client.get(f"/v1/cache/requests/{answer['id']}")).json()
        return told["id"], told


async def test_a_ledger_that_refuses_is_not_ready(data_dir, tiny):
    """A newer version changed it meanwhile: probes send no more requests here."""
    async with served(data_dir, tiny) as (_, client):
        assert 200 == (await client.get("/health/ready")).status_code
        with closing(sqlite3.connect(data_dir / "ledger.sqlite3")) as plain:
            plain.execute("UPDATE meta SET value = x'39' WHERE name = 'schema'")
            plain.commit()
        with anyio.fail_after(60):
            while (answer := await client.get("/health/ready")).status_code == 200:
                await anyio.sleep(0.05)
        assert 503 == answer.status_code
        assert "start this server again with that version" in answer.text
