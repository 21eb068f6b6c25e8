"""`cachesvc conform --offline` on a tiny model: a real server, every tier, and a broken engine."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.live_server import ForkedServer
from tests.support.models import save_tiny_model

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1800)]
ROOT = Path(__file__).parents[2]
SCRIPT = Path(sys.executable).with_name("cachesvc")
SIZES = {"DEVICE_BYTES": "2MiB", "HOST_BYTES": "2MiB", "DISK_BYTES": "1GiB", "BLOCK_SIZE": "16"}
# Makes a process import the broken copies beside it in place of the modules they are named after.
SITE = """
import importlib.util, pathlib, sys

class Broken:
    @staticmethod
    def find_spec(name, path=None, target=None):
        file = pathlib.Path(__file__).with_name(name + ".py")
        if "." in name and file.exists():
            return importlib.util.spec_from_file_location(name, file)

sys.meta_path.insert(0, Broken)
"""
TILE = "        begin, until = max(low, start), min(low + tile, end)\n"
ZEROS = "torch.cat([keys[:, :1] * 0.0, keys[:, 1:]], 1)"
SHORT = "end - int(end - start > 8)", "stop - int(end - start > 8)"
# By what is wrong: the module, its sound text, and the broken one.
BREAKS = {
    "a tile that begins in its middle reads its first key as zeros": [
        (
            "engine.attention.dense",
            TILE,
            f"{TILE}        if begin > low:\n            keys = {ZEROS}\n",
        )
    ],
    "the last value of a long chunk is not written": [
        (
            "engine.attention.dense",
            "values[:, start:end].copy_(call.value[first:stop].",
            f"values[:, start : {SHORT[0]}].copy_(call.value[first : {SHORT[1]}].",
        )
    ],
}


def conform(tmp_path: Path, *, cases: int, **environment: str) -> tuple[Any, Any]:
    """The finished command on a tiny model, and its JSON."""
    if not (tmp_path / "tiny").exists():
        save_tiny_model(tmp_path / "tiny")
    small = {f"CACHESVC_CACHE__{name}": size for name, size in SIZES.items()}
    asked = ["--text", "--block", "16", "--longest", "50", "--cases", str(cases), "--json"]
    command = [SCRIPT, "conform", "--offline", "--model", "tiny"]
    done = subprocess.run(
        [*command, *asked],
        env={**os.environ, **small, "OMP_NUM_THREADS": "1", **environment},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.startswith("{"), done.stdout + done.stderr
    return done, json.loads(done.stdout)


def test_our_own_server_conforms_and_says_what_serves(tmp_path):
    done, told = conform(tmp_path, cases=200)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (told["flips"], told["faults"]) == (0, [])
    assert set(told["tiers"]) >= {"device", "host", "disk"}
    assert (told["serves"]["dtype"], told["serves"]["engine"]) == ("float32", "embedded")

    server = ForkedServer(tmp_path, tmp_path / "tiny")
    try:
        url = server.start()
        exactness = httpx.get(f"{url}/v1/models").json()["data"][0]["exactness"]
        same = ("weights", "tokenizer", "layout", "arithmetic", "dtype")
        assert [told["serves"][name] for name in same] == [
            exactness["serves"][name] for name in same
        ]
    finally:
        server.stop()


@pytest.mark.slow
@pytest.mark.parametrize("broken", BREAKS)
def test_an_engine_broken_on_purpose_is_found(tmp_path, broken):
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(SITE)
    for module, sound, instead in BREAKS[broken]:
        source = (ROOT / f"{module.replace('.', '/')}.py").read_text()
        assert source.count(sound) == 1, f"{module} has changed: break it elsewhere"
        (site / f"{module}.py").write_text(source.replace(sound, instead))
    done, told = conform(tmp_path, cases=40, PYTHONPATH=str(site))
    assert done.returncode == 1 and told["faults"], done.stdout + done.stderr
    assert told["flips"] > 0
