"""Quotas in a node: what an owner was promised, nobody else evicts, in memory and on the disk."""

import random

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tests.unit.test_node_pool import purge
from tests.unit.test_node_socket import LAYOUT, below, joined, serving
from tiers.blocks.keys import CacheScope, PrefixKey, block_ids, token_bytes
from tiers.errors import ConfigurationError, NodeError
from tiers.node.arena import create, frame_stride
from tiers.node.capacity import Capacity
from tiers.node.pool import Pool
from tiers.policy.owners import ScopeOwners
from tiers.policy.quota import Quotas, QuotaShares
from tiers.tier import TierName

STRIDE = frame_stride(LAYOUT)
ROOTS = {name: CacheScope(weights=b"w", tenant=name.encode()).root() for name in ("a", "b", "c")}
OWNERS = {root: f"tenant:{name}" for name, root in ROOTS.items()}


def prompt(tenant, number, num_blocks=1):
    return block_ids(ROOTS[tenant], token_bytes([number] * 4 * num_blocks), 4)


def fair(num_frames, quotas, default=0):
    """A pool of so many frames; quotas in frames."""
    owners = ScopeOwners()
    owners.learn(OWNERS)
    promised = {name: frames * STRIDE for name, frames in quotas.items()}
    total = num_frames * STRIDE
    shares = QuotaShares(total, promised, default * STRIDE, owners.of)
    return Pool(create(LAYOUT, num_frames), Capacity(total, Quotas(shares, total))), owners


def put(pool, ids):
    pool.commit([frame for _, frame in pool.reserve(ids)])
    pool.check()


def test_a_pinned_block_within_its_owners_share_stays_in_memory():
    pool, _ = fair(8, {"tenant:a": 4, "tenant:b": 4})
    ids = prompt("a", 0, 3)
    put(pool, ids)
    pool.residency.pinned_keys = {each.key for each in ids}
    for each in ids:
        block = pool.residency.ready(each.key)
        pool.residency.queue.loaded(block, held=True)  # the tier below has it too
        pool.residency.pin(block)
    assert 5 == len(pool.reserve(prompt("b", 1, 5))), "what is in use cannot leave"
    assert [] == pool.reserve(prompt("b", 2))
    assert 3 == len(pool.probe(ids).tiers)
    pool.check()


def store(client, ids, noise):
    pairs = client.reserve(ids)
    for _, frame in pairs:
        payload = bytearray(noise.randbytes(client.memory.stride))
        client.memory.rows[frame] = torch.frombuffer(payload, dtype=torch.uint8)
    client.commit([frame for _, frame in pairs])
    while client.stats()["pools"][0]["is_writing"]:
        pass


def test_a_node_keeps_quotas_in_memory_and_on_disk_and_over_its_restart(tmp_path):
    path, noise = tmp_path / "node.sock", random.Random(1)
    quotas = {"tenant:a": 1 << 20}  # half of 1 MiB of memory and 1 MiB of disk
    with serving(path, quotas=quotas, **below(tmp_path, 1 << 20)), joined(path) as client:
        client.know(OWNERS)
        for number in range(10):
            store(client, prompt("a", number), noise)
        for number in range(300):
            store(client, prompt("b", number), noise)
        tiers = [client.probe(prompt("a", number)) for number in range(10)]
        assert [[TierName.HOST]] * 10 == tiers
        told = {(each["tier"], each["group"]): each for each in client.stats()["groups"]}
        assert 10 * STRIDE == told["host", "tenant:a"]["used_bytes"]
        assert 10 * LAYOUT.nbytes <= told["disk", "tenant:a"]["used_bytes"]
        assert 230_000 < told["disk", "tenant:a"]["share_bytes"] < 240_000, "half of its records"
        assert told["host", "common"]["used_bytes"] > told["host", "common"]["share_bytes"]
        for number in range(100):  # it holds on the disk as well
            store(client, prompt("c", number), noise)
    with serving(path, quotas=quotas, **below(tmp_path, 1 << 20)), joined(path) as client:
        told = {(each["tier"], each["group"]): each for each in client.stats()["groups"]}
        assert told["disk", "tenant:a"]["used_bytes"] >= 10 * LAYOUT.nbytes, "names are kept"
        tiers = [client.probe(prompt("a", number)) for number in range(10)]
        assert [[TierName.DISK]] * 10 == tiers


def test_quotas_that_promise_too_much_are_refused_at_the_start(tmp_path):
    with (
        pytest.raises(ConfigurationError, match="promise"),
        serving(tmp_path / "node.sock", quotas={"tenant:a": 2 << 20}),
    ):
        pass


@pytest.mark.parametrize(
    "told", [None, [], {"xx": "a"}, {"00": "a"}, {"00" * 16: 5}, {"00" * 16: ""}]
)
def test_owners_that_make_no_sense_are_refused(tmp_path, told):
    path = tmp_path / "node.sock"
    with serving(path, quotas={"*": 1}), joined(path) as client:
        with pytest.raises(NodeError, match="owners"):
            client._tell({"do": "owners", "owners": told})
        with joined(path) as other:
            assert 1 == other.stats()["num_clients"]


def test_a_damaged_list_of_owners_is_no_list(tmp_path):
    (tmp_path / "owners.json").write_text("{")
    assert {} == ScopeOwners(tmp_path).names()


class FairMachine(RuleBasedStateMachine):
    """Whatever three tenants do, nobody loses what was promised to another's block."""

    def __init__(self):
        super().__init__()
        self.pool, self.owners = fair(8, {"tenant:a": 3, "tenant:b": 2})
        self.leased = []

    @rule(tenant=st.sampled_from("abc"), number=st.integers(0, 9), size=st.integers(1, 3))
    def store(self, tenant, number, size):
        quotas = self.pool.capacity.quotas
        before = quotas.usage()
        ids = prompt(tenant, number, size)
        self.pool.commit([frame for _, frame in self.pool.reserve(ids)])
        asks, after = quotas.group(ROOTS[tenant]), quotas.usage()
        for group, (used, share) in before.items():
            assert group == asks or after[group][0] >= min(used, share), (group, before, after)

    @rule(tenant=st.sampled_from("abc"), number=st.integers(0, 9))
    def lease(self, tenant, number):
        frames = self.pool.settle(self.pool.lease(prompt(tenant, number)))
        if frames and len(self.leased) < 4:
            self.leased.append(frames)
        else:
            self.pool.release(frames)

    @rule()
    def release(self):
        if self.leased:
            self.pool.release(self.leased.pop())

    @rule(tenant=st.sampled_from("abc"), name=st.sampled_from(["tenant:a", "tenant:b", "group:x"]))
    def rename(self, tenant, name):
        self.owners.learn({PrefixKey(ROOTS[tenant]): name})
        self.pool.capacity.regroup()

    @rule(tenant=st.sampled_from("abc"))
    def purge(self, tenant):
        purge(self.pool, ROOTS[tenant])

    @invariant()
    def what_is_counted_is_there(self):
        self.pool.check()


TestFairMachine = FairMachine.TestCase
TestFairMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
