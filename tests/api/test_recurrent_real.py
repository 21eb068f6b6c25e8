"""A model with recurrent states over HTTP: what a hit bills, a restart, a purge, other models."""

import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest

from cachesvc.config.places import states_path
from cachesvc.operator.purge import purge_stopped
from cachesvc.operator.scopes import ScopeKind, roots_of
from cachesvc.service import Service
from tests.api.real_service import served
from tests.parity import architectures
from tests.support.models import save_model, save_tiny_model
from tiers.disk.inspection.opening import open_shards

pytestmark = pytest.mark.timeout(120)
BLOCK = 16
PROMPT = [number * 7 % 250 for number in range(150)]
END = 144  # the last block's end before the prompt's


@pytest.fixture
def hybrid(tmp_path):
    """A tiny Qwen3-Next as users have it on disk."""
    logging.getLogger("transformers").setLevel(logging.ERROR)  # of kernels that are not installed
    folder = tmp_path / "hybrid"
    save_model(folder, architectures.stock("qwen3_next"))
    return folder


async def ask(client: httpx.AsyncClient, model: Path, prompt: list[int] = PROMPT) -> dict[str, Any]:
    body = {"model": str(model), "prompt": prompt, "max_tokens": 4, "temperature": 0}
    answer = await client.post("/v1/completions", json=body)
    assert 200 == answer.status_code, answer.text
    told: dict[str, Any] = answer.json()
    assert told["usage"]["prompt_tokens"] == len(prompt)
    return told


def hits(answer: Mapping[str, Any]) -> Mapping[str, int]:
    by_tier = answer["usage"]["prompt_tokens_details"]["cached_tokens_details"]
    return {tier: tokens for tier, tokens in by_tier.items() if tokens}


async def purge(client: httpx.AsyncClient, service: Service) -> dict[str, Any]:
    order = {"kind": "tenant", "name": "default", "why": "the customer asked"}
    headers = {"Authorization": f"Bearer {service.dashboard.parts.operator_token}"}
    answer = await client.post("/admin/api/cache/purge", json=order, headers=headers)
    assert 200 == answer.status_code, answer.text
    told: dict[str, Any] = answer.json()
    return told


def num_checkpoints(data_dir: Path) -> int:
    """On disk, without the server."""
    with open_shards(states_path(data_dir), readonly=True) as (_, shards):
        return sum(shard.read_totals().num_blocks for shard in shards)


async def test_hits_are_billed_by_tier_and_come_back_from_disk(tmp_path, hybrid):
    data_dir = tmp_path / "data"
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


async def test_a_purge_leaves_no_checkpoint_in_memory_or_on_disk(tmp_path, hybrid):
    data_dir = tmp_path / "data"
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


async def test_a_stopped_server_is_purged_of_its_checkpoints(tmp_path, hybrid):
    data_dir = tmp_path / "data"
    async with served(data_dir, hybrid) as (_, client):
        await ask(client, hybrid)
    held = num_checkpoints(data_dir)
    done = purge_stopped(data_dir, roots_of(data_dir, "default", ScopeKind.TENANT))
    assert 0 == done.num_left == num_checkpoints(data_dir)
    assert held == done.checkpoints["disk"].num_blocks > 0


async def test_a_purge_reaches_a_disk_tier_that_is_turned_off(tmp_path, hybrid):
    """Turned on again, it would serve what the receipt says is gone."""
    data_dir = tmp_path / "data"
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


async def test_another_model_leaves_no_checkpoint_behind(tmp_path, hybrid):
    """A model without recurrent states could neither use them nor purge them."""
    data_dir, dense = tmp_path / "data", tmp_path / "dense"
    async with served(data_dir, hybrid) as (_, client):
        await ask(client, hybrid)
    assert num_checkpoints(data_dir)
    save_tiny_model(dense)
    async with served(data_dir, dense) as (_, client):
        await ask(client, dense)
    assert [] == list(states_path(data_dir).glob("shard-*"))
    async with served(data_dir, hybrid) as (_, client):
        assert {} == hits(await ask(client, hybrid))
