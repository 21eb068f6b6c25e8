"""`cachesvc conform --offline` on a tiny model: a real server, every tier, a restart."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.models import save_tiny_model

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1800)]
SCRIPT = Path(sys.executable).with_name("cachesvc")
SIZES = {"DEVICE_BYTES": "2MiB", "HOST_BYTES": "2MiB", "DISK_BYTES": "1GiB"}


def test_our_own_server_conforms_from_every_tier_and_after_a_restart(tmp_path: Path) -> None:
    save_tiny_model(tmp_path / "tiny")
    output = tmp_path / "out.json"
    small = {f"CACHESVC_CACHE__{name}": size for name, size in SIZES.items()}
    options = ["--text", "--block", "10", "--longest", "90", "--cases", "300"]
    done = subprocess.run(
        [
            SCRIPT,
            "conform",
            "--offline",
            "--model",
            tmp_path / "tiny",
            *options,
            "--output",
            output,
        ],
        env={**os.environ, **small, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(output.read_text())
    assert (told["flips"], told["faults"]) == (0, [])
    assert set(told["tiers"]) >= {"device", "host", "disk"}
    assert told["kinds"]["restarted"]["cases"] > 0
