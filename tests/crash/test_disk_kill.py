"""`kill -9` at every named point of a write: reopened, the tier serves only what was written.

A child process writes and dies inside its storage; the parent reopens the folder.
"""

import errno
import math
import os
import signal
import subprocess
import sys
import threading
from contextlib import closing

import pytest

from billing.errors import StoreError
from billing.store.opening import open_store
from tests.children import in_child
from tests.support.faulty_storage import LAYOUT, KillingStorage, chain, fetched, put, take
from tiers.blocks.frames import FrameArena
from tiers.disk.directory import DirectoryLock, is_locked
from tiers.disk.open import open_disk
from tiers.errors import ConfigurationError, MissReason

CAPACITY = 1 << 20
POINTS = ["begin_write", "delete", "put", "view", "commit", "committed", "sync"]
FRAMES = take(FrameArena(LAYOUT, 9), 9)


def opened(root, storage=None):
    # However long a check takes: until its end a shard is only read.
    return open_disk(root, LAYOUT, CAPACITY, storage=storage, check_s=math.inf)


def blocks(seed):
    return chain(8, block_size=LAYOUT.block_size, seed=seed)


def store(tier, seed):
    put(tier, blocks(seed), FRAMES)


def write_until_killed(root, point, number):
    """Write to die at the `number`th `point`; tell in a file what was stored."""
    tier = opened(root, KillingStorage(point, number))
    for seed in range(20):
        store(tier, seed)
        (root / "stored").write_text(str(seed))
        if seed % 4 == 3:
            tier.flush()
    tier.close()


def num_served(tier, seed):
    """Blocks of a chain that are served, each checked."""
    loaded = fetched(tier, blocks(seed), FRAMES)
    assert loaded.reason in (None, MissReason.ABSENT), f"a crash corrupted a block: {loaded}"
    return loaded.num_blocks


@pytest.mark.parametrize("point", POINTS)
def test_killed_at_a_point_of_a_write(tmp_path, point):
    """What was committed before the kill is served, the rest is absent, and nothing is wrong."""
    for number in (1, 2, 3, 7, 20, 60, 150):
        root = tmp_path / str(number)
        status = in_child(write_until_killed, root, point, number)
        killed = status == -signal.SIGKILL
        assert killed or status == 0
        with closing(opened(root)) as tier:
            written = root / "stored"
            last = int(written.read_text()) if written.exists() else -1
            served = [num_served(tier, seed) for seed in range(20)]
            if last >= 0:
                assert served[last] == 8, "what was stored before the kill is served after it"
            assert tier.stats().num_blocks >= sum(served)
            assert not tier.stats().faults
            for seed in range(20, 40):
                store(tier, seed)
            assert num_served(tier, 39) == 8
            assert tier.stats().used_bytes <= CAPACITY
            with tier._slots[0].use() as shard:
                assert shard.walk() is None, "accounts and records are in step"
        if not killed:
            break


def test_a_look_at_the_lock_does_not_refuse_a_start(tmp_path, monkeypatch):
    """A command asks whether a server holds the folder, in the moment in which one starts."""
    monkeypatch.setattr("tiers.disk.directory.LOOK_S", 60.0)
    looks = "import fcntl, sys; f = open(sys.argv[1], 'a'); fcntl.flock(f, fcntl.LOCK_SH); "
    command = [sys.executable, "-Ic", looks + "print(flush=True); sys.stdin.read()"]
    with subprocess.Popen(
        [*command, str(tmp_path / "server.lock")], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as looker:
        looker.stdout.readline()
        assert not is_locked(tmp_path)
        threading.Timer(0.2, looker.stdin.close).start()
        lock = DirectoryLock(tmp_path)
    assert is_locked(tmp_path)
    lock.release()


def test_a_file_system_without_locks_is_named(tmp_path, monkeypatch):
    def flock(file, how):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("fcntl.flock", flock)
    with pytest.raises(ConfigurationError, match=r"server\.lock cannot be locked .*network mounts"):
        DirectoryLock(tmp_path)
    store = open_store(f"sqlite:///{tmp_path / 'ledger.sqlite3'}")
    with pytest.raises(StoreError, match=r"cannot be locked .* or in PostgreSQL"):
        store.claim("server")
    store.close()
