"""A shard is checked before LMDB opens it; one that takes long is read meanwhile."""

import os
import pickle

import lmdb
import pytest

from tests.crash.test_disk_damage import CAPACITY, FRAMES, LAYOUT, PAGE, blocks, data_file
from tests.patience import until
from tests.support.disks import closed_later
from tests.support.faulty_storage import FaultyStorage, fetched, map_full, put
from tiers.blocks.keys import PrefixKey
from tiers.disk.format.rows import pack_order, pack_sequence
from tiers.disk.inspection.opening import repair_folder
from tiers.disk.inspection.verify import verify_all
from tiers.disk.inspection.view import open_view
from tiers.disk.open import open_disk
from tiers.disk.recovery.check import ShardCheck, ShardReport, check_shard
from tiers.disk.recovery.page import BRANCH, LEAF
from tiers.disk.recovery.pages import PageFile
from tiers.disk.shard import ShardBusy
from tiers.errors import ConfigurationError, MissReason
from tiers.tier import Loaded


def opened(root, storage=None, check_s=10):
    return closed_later(open_disk(root, LAYOUT, CAPACITY, storage=storage, check_s=check_s))


def store(tier, seed):
    return put(tier, blocks(seed), FRAMES)


def load(tier, seed):
    return fetched(tier, blocks(seed), FRAMES)


def wait_for_check(tier):
    until(lambda: tier.flush() or tier.stats().shards[0].ready)


@pytest.fixture
def filled(tmp_path):
    """A folder with ten chains."""
    root = tmp_path / "disk"
    tier = opened(root)
    for seed in range(10):
        store(tier, seed)
    tier.close()
    return root


def pages_of(data, *kinds):
    """Offsets of pages of these kinds."""
    return [at for at in range(8192, len(data), PAGE) if data[at + 10] in kinds]


def tear(root):
    """Zero every page of structure, as if none had reached the disk before the power went."""
    data = bytearray(data_file(root).read_bytes())
    for at in pages_of(data, BRANCH, LEAF):
        data[at : at + PAGE] = bytes(PAGE)
    data_file(root).write_bytes(data)


def test_a_shard_too_large_to_check_at_once_is_served_meanwhile(filled):
    """Every block is served during the check, new ones are refused, and then all is as before."""
    tier = opened(filled, check_s=0)
    assert tier.stats().shards[0].checking
    assert tier.stats().num_blocks == 80
    assert [load(tier, seed) for seed in range(10)] == [Loaded(8, None)] * 10
    assert tier.probe(blocks(3)) == 8
    assert load(tier, 99) == Loaded(0, MissReason.ABSENT)
    wait_for_check(tier)
    assert tier.stats().faults == {}
    assert store(tier, 10) == []
    assert [load(tier, seed) for seed in range(11)] == [Loaded(8, None)] * 11


def test_what_is_stored_during_a_check_is_refused_and_said(filled, monkeypatch):
    monkeypatch.setattr(ShardCheck, "poll", lambda check: None)
    tier = opened(filled, check_s=0)
    assert store(tier, 10) == [block.key for block in blocks(10)]
    assert tier.discard([blocks(0)[0].key]) == 0
    with pytest.raises(ShardBusy):
        tier.purge([blocks(0)[0].scope])
    with tier.view() as view:
        assert view.shards == []


def test_a_broken_shard_is_given_up_when_its_check_ends(filled):
    """Until then nothing is found in it; then it is empty, counted, and takes blocks."""
    tear(filled)
    tier = opened(filled, check_s=0)
    assert load(tier, 0) == Loaded(0, MissReason.ABSENT)
    wait_for_check(tier)
    assert tier.stats().faults[MissReason.TORN] >= 1
    store(tier, 1)
    assert load(tier, 1) == Loaded(8, None)


def test_a_check_that_finds_much_ends_all_the_same(filled):
    """The child has more to say than a pipe holds, 64 KiB."""
    with lmdb.open(str(filled / "shard-000"), map_size=CAPACITY, max_dbs=8) as env:
        order = env.open_db(b"order", create=False)
        with env.begin(write=True) as txn:
            for number in range(12_000):
                row = pack_order(PrefixKey(b"nobody's".ljust(16)), 0)
                txn.put(pack_sequence((1 << 40) + number), row, db=order, append=True)
    report = check_shard(filled / "shard-000", CAPACITY)
    assert len(pickle.dumps(report)) > 64 << 10
    tier = opened(filled, check_s=0)
    wait_for_check(tier)
    assert load(tier, 5) == Loaded(8, None)
    assert store(tier, 10) == []


def test_closing_does_not_wait_for_a_check(filled):
    tier = opened(filled, check_s=0)
    tier.close()
    tier = opened(filled)
    assert load(tier, 5) == Loaded(8, None)


@pytest.mark.parametrize(
    "error", [lmdb.CorruptedError, lmdb.PageNotFoundError, lmdb.PageFullError, lmdb.PanicError]
)
@pytest.mark.parametrize("operation", ["get", "put", "commit", "begin_write", "delete"])
def test_an_error_of_lmdb_in_a_sound_shard_costs_no_block(filled, operation, error):
    """The shard is checked, found sound and opened again."""
    storage = FaultyStorage(error=lambda: error("MDB"))
    tier = opened(filled, storage)
    storage.arm(1, operations=[operation])
    load(tier, 0)
    tier.discard([blocks(1)[7].key])
    store(tier, 10)
    tier.flush()
    assert storage.num_failed == 1
    assert [load(tier, seed).num_blocks for seed in (0, 2, 10)] == [8, 8, 8]
    assert tier.stats().shards[0].ready
    assert MissReason.TORN not in tier.stats().faults


def test_a_shard_that_fails_again_and_again_is_replaced(filled):
    """A check that finds nothing does not keep a tier from storing for good."""
    storage = FaultyStorage(error=lambda: lmdb.PageFullError("MDB_PAGE_FULL"))
    tier = opened(filled, storage)
    storage.arm(1, count=4, operations=["commit"])
    for _ in range(3):
        store(tier, 10)
    assert tier.stats().faults[MissReason.TORN] == 80
    assert load(tier, 10) == Loaded(8, None)


def test_a_record_whose_page_header_is_gone_can_be_evicted(filled):
    """LMDB frees as many pages as that header says."""
    data = bytearray(data_file(filled).read_bytes())
    for at in pages_of(data, 0x04):
        data[at + 8 : at + 16] = b"\xff" * 8
    data_file(filled).write_bytes(data)
    tier = opened(filled)
    for seed in range(10, 120):
        store(tier, seed)
        assert load(tier, seed) == Loaded(8, None)
    with tier.view() as view:
        assert verify_all(view.shards).sound
    tier.close()
    assert check_shard(filled / "shard-000", CAPACITY).problem is None


def test_one_torn_page_of_the_last_commit_costs_that_commit(filled):
    """The previous state remains, which LMDB keeps until two commits later."""
    tier = opened(filled)
    store(tier, 10)
    store(tier, 11)
    tier.close()
    path = data_file(filled)
    with path.open("r+b") as file:
        pages = PageFile(file.fileno(), CAPACITY)
        newest, before = pages.heads()
        root = pages.trees(newest)["state"].root
        assert root != pages.trees(before)["state"].root
        os.pwrite(file.fileno(), os.urandom(PAGE), root * PAGE)
    tier = opened(filled)
    assert tier.stats().faults == {MissReason.TORN: 1}
    assert [load(tier, seed).num_blocks for seed in range(11)] == [8] * 11
    store(tier, 11)
    assert load(tier, 11) == Loaded(8, None)


def contradict(root):
    """Give one block a wrong length in the index."""
    tier = opened(root)
    with tier._slots[0].use() as shard:
        entry = shard.find([blocks(3)[2].key])[0]
    tier.close()
    data = data_file(root).read_bytes()
    wrong = entry._replace(place=entry.place._replace(nbytes=entry.place.nbytes + 7))
    assert entry.pack() in data
    data_file(root).write_bytes(data.replace(entry.pack(), wrong.pack()))


def test_entries_that_contradict_each_other_are_taken_out(filled):
    """A wrong place in the index costs its block; the others and all accounts stay."""
    with open_view(filled) as view:
        [before] = view.accounts().values()
    contradict(filled)
    tier = opened(filled)
    assert tier.stats().faults == {MissReason.TORN: 1}
    assert tier.stats().num_blocks == 79
    assert load(tier, 3) == Loaded(2, MissReason.ABSENT)
    assert load(tier, 4) == Loaded(8, None)
    with tier.view() as view:
        assert verify_all(view.shards).sound
        [account] = view.accounts().values()
    assert account.num_blocks == 79
    assert 0 < before.stored_bytes - account.stored_bytes <= LAYOUT.nbytes + PAGE


@pytest.mark.parametrize("operation", ["delete", "put", "commit"])
def test_a_shard_without_room_for_its_repair_is_replaced(filled, operation):
    """LMDB writes changed pages to new places, and a full map has no free ones."""
    contradict(filled)
    storage = FaultyStorage(1, operations=[operation], error=map_full)
    tier = opened(filled, storage)
    assert storage.num_failed == 1
    assert tier.stats().num_blocks == 0
    assert tier.stats().faults[MissReason.TORN] >= 1
    assert store(tier, 3) == []
    assert load(tier, 3) == Loaded(8, None)


def test_a_list_of_free_pages_may_have_several_levels(filled):
    """A long reader keeps every commit's pages on the list, whose keys are integers."""
    room = 16 << 20
    env = lmdb.open(str(data_file(filled).parent), max_dbs=8, map_size=room, sync=False)
    state = env.open_db(b"state", create=False)
    with env.begin(state) as reader:
        key, value = next(iter(reader.cursor()))
        for _ in range(300):
            with env.begin(state, write=True) as writer:
                writer.delete(key)
                writer.put(key, value)
    env.close()
    with data_file(filled).open("rb") as file:
        head = PageFile(file.fileno(), room).heads()[0]
    assert (head.free.depth, head.free.branch_pages) == (2, 1)
    assert head.free.leaf_pages > 2
    assert check_shard(filled / "shard-000", room) == ShardReport(
        slot=head.slot, transaction=head.transaction
    )


def test_a_shard_of_another_version_of_lmdb_is_not_damaged(filled):
    with data_file(filled).open("r+b") as file:
        for page in (0, PAGE):
            os.pwrite(file.fileno(), b"\2", page + 20)
    assert check_shard(filled / "shard-000", CAPACITY) == ShardReport()


def test_commands_refuse_a_damaged_shard_and_repair_replaces_it(filled):
    tear(filled)
    refused = pytest.raises(ConfigurationError, match=r"is damaged: .*verify --repair")
    with refused, open_view(filled):
        pass
    assert "was replaced by an empty shard" in repair_folder(filled)[0]
    with open_view(filled) as view:
        assert verify_all(view.shards).sound
        assert view.summary().num_blocks == 0
    assert repair_folder(filled) == []


def test_repair_leaves_a_folder_to_its_server(filled):
    opened(filled)
    assert repair_folder(filled) == []
