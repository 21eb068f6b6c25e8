"""Each tier off, as small as it can be, and ample: served, hit after a restart, and told truly."""

import re

import pytest

from tests.live_clients import completed, hits_of
from tests.live_server import ForkedServer
from tests.support.models import LARGE_KV, save_tiny_model

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

PROMPT = "x" * 75  # four whole blocks
DEVICE = {"0": "1 GiB", "4MiB": "4 MiB", "64MiB": "64 MiB"}  # as the start shows it
HOST_ABOVE = {"0": "8 MiB", "1MiB": "8 MiB instead of 1 MiB", "64MiB": "64 MiB"}  # above a disk
HOST_ALONE = {"0": "", "1MiB": "8 MiB instead of 1 MiB", "64MiB": "64 MiB"}
DISK = {"0": "", "8MiB": "8 MiB", "64MiB": "64 MiB"}
ROWS = [
    (list(DEVICE)[(number + other) % 3], host, disk)
    for number, host in enumerate(HOST_ABOVE)
    for other, disk in enumerate(DISK)
]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "wide"
    save_tiny_model(folder, **LARGE_KV)
    return folder


@pytest.mark.parametrize(("device", "host", "disk"), ROWS)
def test_tiers_of_every_size_serve_and_are_told_truly(device, host, disk, model, tmp_path):
    server = ForkedServer(tmp_path, model)
    server.more = ("--device-cache", device, "--host-cache", host, "--disk-cache", disk)

    def hits():
        """The tokens that each tier served."""
        return hits_of(completed(server.url, "wide", PROMPT, max_tokens=2))

    shown = {
        "device": DEVICE[device],
        "host": (HOST_ALONE if disk == "0" else HOST_ABOVE)[host],
        "disk": DISK[disk],
    }
    try:
        server.start()
        said = re.search(r"serves wide on \S+ \((.*); data in", server.log)
        assert ", ".join(f"{name} {has}" for name, has in shown.items() if has) == said[1]
        assert 0 == sum(hits().values())
        assert 64 <= sum(hits().values())
        tiers = server.told("cache", "stats")["tiers"]
        assert (disk != "0") is ("disk" in tiers)
        assert (tiers["host"]["capacity_bytes"] > 0) is bool(shown["host"])
        server.stop()
        lost = re.search(r"stopped; .*?(\d+) blocks lost", server.log)
        assert ("without a disk tier" in lost[0]) is (disk == "0") is (int(lost[1]) > 0)
        if disk != "0":
            server.start()
            assert 64 == hits()["disk"]
            server.stop()
    finally:
        server.kill()
    assert "Traceback" not in server.log
