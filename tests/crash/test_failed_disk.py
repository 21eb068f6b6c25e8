"""A server whose file system fails under it: it says so, refuses, and ends without a traceback."""

import fcntl
import os
import signal
import struct
from pathlib import Path

import httpx
import pytest

from billing.errors import LedgerUnavailable
from billing.money import UNITS
from billing.proof import audit
from tests.live_server import LiveServer
from tests.mounts import mounted
from tests.support.billing import running_ledger
from tests.support.models import save_tiny_model

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

NO_FLUSH = 2  # of the ioctl: what is not on the disk yet is lost
EXT4_IOC_SHUTDOWN = 0x8004587D
CACHE = {"model": "tiny", "prompt": "a long beginning " * 20, "ttl": 600}


@pytest.fixture
def disk(tmp_path):
    with mounted(tmp_path, "ext4", 400 << 20, "errors=remount-ro") as folder:
        yield folder


def turn_read_only(disk):
    """As the kernel does when it finds a damaged block."""
    device = next(
        line.split()[0]
        for line in Path("/proc/mounts").read_text().splitlines()
        if line.split()[1] == str(disk)
    )
    Path(f"/sys/fs/ext4/{Path(device).name}/trigger_fs_error").write_text("1")


def return_errors(disk):
    """Every later read and write fails with EIO."""
    handle = os.open(disk, os.O_RDONLY)
    try:
        fcntl.ioctl(handle, EXT4_IOC_SHUTDOWN, struct.pack("I", NO_FLUSH))
    finally:
        os.close(handle)


def test_a_lost_device_is_not_a_damaged_ledger(disk):
    """SQLite says of both that the file is malformed. Who restores a copy loses newer charges."""
    path = disk / "ledger.sqlite3"
    with running_ledger(f"sqlite:///{path}") as house:
        house.ledger.store.renew_log()
        house.fund(UNITS)
        house.ledger.store.engine.dispose()
        with house.ledger.store.reading():
            return_errors(disk)
        with pytest.raises(LedgerUnavailable):
            audit.verify(house.ledger.store)
        assert f"the disk of {path} failed (Input/output error)" in house.ledger.refuses
        assert "restore no copy" in house.ledger.refuses


@pytest.mark.parametrize("fail", [turn_read_only, return_errors])
def test_a_failed_disk_is_said_and_left_without_a_traceback(tmp_path, disk, fail):
    save_tiny_model(tmp_path / "tiny")
    server = LiveServer(tmp_path, tmp_path / "tiny")
    server.data_dir = disk / "data"
    headers = server.customer("acme", 1000 * UNITS)
    server.start()
    try:
        assert [200, 200] == [complete(server, headers) for _ in range(2)]
        assert 200 == httpx.get(f"{server.url}/health/ready").status_code
        fail(disk)
        assert {503} == {complete(server, headers) for _ in range(3)}
        ready = httpx.get(f"{server.url}/health/ready")
        reason = ready.json()["reason"]
        assert 503 == ready.status_code and "copy" not in reason, "the file is whole"
        assert reason.startswith(("the ledger cannot be written", "the ledger is closed")), reason
        assert 200 == httpx.get(f"{server.url}/health").status_code, "a restart would mend nothing"
        answers = [
            httpx.post(f"{server.url}/v1/caches", json=CACHE, headers=headers),
            httpx.get(f"{server.url}/user/balance", headers=headers),
            httpx.get(f"{server.url}/v1/usage", headers=headers),
        ]
        assert {answer.status_code for answer in answers} <= {200, 503}
        os.kill(server.pid, signal.SIGTERM)
        assert server.wait() in (0, 1)
    finally:
        server.kill()
    assert "Traceback" not in server.log


def complete(server, headers):
    body = {"model": "tiny", "prompt": os.urandom(40).hex(), "max_tokens": 4}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, headers=headers, timeout=60)
    return answer.status_code
