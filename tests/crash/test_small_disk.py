"""A disk smaller than its setting, and filled by others: requests go on, and room comes back."""

import random
import shutil
from collections import Counter

import httpx
import pytest

from tests.live_server import ForkedServer
from tests.mounts import mounted
from tests.patience import until
from tests.support.models import LARGE_KV, save_tiny_model

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

SIZE = 220 << 20
RESERVE = SIZE // 4
BLOCKS = RESERVE // 8  # of a file system in use, what else it has


class SmallDisk(ForkedServer):
    """A server on that disk, with a disk tier of 8 GiB."""

    more = (
        *("--device-cache", "16MiB", "--host-cache", "32MiB", "--disk-cache", "8GiB"),
        *("--block-size", "32"),
    )

    def ask(self, seed):
        """The status of the answer to a prompt of its own, 11 MB of KV."""
        dice = random.Random(seed)
        prompt = "".join(dice.choices("abcdefgh ", k=350))
        body = {"model": "wide", "prompt": prompt, "max_tokens": 2}
        return httpx.post(f"{self.url}/v1/completions", json=body, timeout=60).status_code

    def answers(self, count, first):
        found = Counter(self.ask(first + number) for number in range(count))
        assert "Traceback" not in self.log
        return found

    def files(self):
        found = self.data_dir.glob("disk/shard-*/data.mdb")
        return sum(file.stat().st_blocks * 512 for file in found)


@pytest.fixture(params=["ext4", "tmpfs"])
def disk(request, tmp_path):
    with mounted(tmp_path, request.param, SIZE) as folder:
        yield folder


def fill(path):
    """Takes all that is left, to the last byte."""
    with path.open("ab", buffering=0) as file:
        for nbytes in (1 << 20, 4096, 1024):
            try:
                while True:
                    file.write(bytes(nbytes))
            except OSError:
                continue


def free(disk):
    return shutil.disk_usage(disk).free


def test_a_cache_never_takes_the_paid_api_down(tmp_path, disk):
    save_tiny_model(tmp_path / "wide", **LARGE_KV)
    server = SmallDisk(tmp_path, tmp_path / "wide")
    server.data_dir = disk / "data"
    server.start()
    count = 120 if disk.name == "ext4" else 40
    try:
        assert "disk " in server.log and "instead of 8 GiB" in server.log
        assert {200: count} == server.answers(count, 0)
        assert server.files() > 20 << 20
        assert free(disk) > RESERVE - BLOCKS
        ready = httpx.get(f"{server.url}/health/ready").json()
        assert "the file system of" in ready["limited"][0]

        fill(disk / "other")  # beside the server
        assert {200: 20} == server.answers(20, 200)
        until(lambda: free(disk) >= RESERVE // 2)
        stats = server.told("cache", "stats")
        assert stats["tiers"]["disk"]["capacity_bytes"] < SIZE < 8 << 30
        assert stats["setting_bytes"] == stats["tiers"]["disk"]["setting_bytes"] == 8 << 30
        (disk / "other").unlink()
        assert {200: 20} == server.answers(20, 300)
        server.stop()

        fill(disk / "other")  # while it is stopped
        assert free(disk) == 0
        server.start()
        assert "back to the file system" in server.log
        assert {200: 10} == server.answers(10, 400)

        server.stop()
        shutil.rmtree(server.data_dir / "disk")
        server.start()
        assert 200 == server.ask(500)
        server.stop()
        assert [] == server.told("ledger", "verify")["problems"]
    finally:
        server.kill()
