"""A store with wrong values costs a vLLM request one load, and its answer is the same."""

import time
from contextlib import contextmanager

import pytest
from redis import Redis

from tests.redis_server import redis_server
from tests.vllm.processes import RunningNode
from tiers.disk.format.record import Header, unpack_header

pytestmark = [pytest.mark.vllm, pytest.mark.redis, pytest.mark.timeout(1800)]

BLOCK = 128
PROMPT = [(place * 7919 + 1) % 40_000 + 100 for place in range(1_000)]
SHORT = [(place * 31 + 7) % 40_000 + 100 for place in range(200)]
WHOLE = (len(PROMPT) - 1) // BLOCK * BLOCK


def names_in_order(store):
    """The names of one prompt's blocks, from the first on."""
    after = {}
    for name in store.scan_iter("cachesvc/*"):
        header = unpack_header(store.get(name))
        assert isinstance(header, Header)
        after[header.parent] = (header.key, name)
    key = next(parent for parent in after if parent not in {key for key, _ in after.values()})
    names = []
    while key in after:
        key, name = after[key]
        names.append(name)
    return names


def test_records_of_other_blocks_are_computed_once_and_deleted(model, started, tmp_path):
    """Valid records, each under the name of another block, as after a bug or by an attacker."""
    with (
        redis_server(tmp_path) as url,
        Redis.from_url(url) as store,
        running_node(tmp_path, url, "one") as one,
        started(model, one, tmp_path) as engine,
    ):
        (first,) = engine.generate(PROMPT)
        engine.forget()  # its blocks are with the node now
        while one.pool()["remote"]["stored"] < WHOLE // BLOCK:
            time.sleep(0.05)
        one.kill()
        names = names_in_order(store)
        values = [store.get(name) for name in names]
        for turn, good in enumerate((0, 2), 1):
            wrong = [*values[:good], *values[good + 1 :], values[good]]
            store.flushall()
            store.mset(dict(zip(names, wrong, strict=True)))
            with running_node(tmp_path, url, f"another {turn}") as node:
                until_linked(engine, node)
                (answer,) = engine.generate(PROMPT)
                engine.forget()  # what it computed is with this node, and not with the next
                assert first["tokens"] == answer["tokens"]
                assert good * BLOCK == (answer["hits"] or {}).get("remote", 0)
                assert turn == engine.log.read_text().count("Recovered from KV load failure")
                assert store.get(names[good]) != wrong[good], "the wrong record is gone"


@contextmanager
def running_node(folder, store, name):
    """A node with an empty disk over the store. All have one socket, one after the other."""
    more = ("--remote-url", store, "--remote-writes", "all")
    node = RunningNode(folder, disk=folder / name, more=more)
    node.start()
    try:
        yield node
    finally:
        node.kill()


def until_linked(engine, node):
    """An engine leaves a node that failed alone for a second; ask until it has stored a block."""
    for _ in range(30):
        engine.forget()
        engine.generate(SHORT)
        if any(pool["stored"] for pool in node.stats()["pools"]):
            break
        time.sleep(0.1)
    engine.forget()
