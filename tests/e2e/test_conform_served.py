"""`cachesvc conform` of a real server of a tiny model: every tier, and a broken engine."""

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.live_server import serve
from tests.support.commands import call
from tests.support.models import save_tiny_model

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1800)]
ROOT = Path(__file__).parents[2]
SMALL = ("--device-cache=2MiB", "--host-cache=2MiB", "--disk-cache=1GiB", "--block-size=16")
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
WRITE = "values[:, start:end].copy_(call.value[first:stop]."
SHORTER = WRITE.replace("start:end]", "start : end - int(end - start > 8)]").replace(
    "first:stop]", "first : stop - int(end - start > 8)]"
)
DENSE = "engine.attention.dense"
# By what is wrong: the module, its sound text, and the broken one.
BREAKS = {
    "a tile that begins in its middle reads its first key as zeros": [
        (DENSE, TILE, f"{TILE}        if begin > low:\n            keys = {ZEROS}\n")
    ],
    "the last value of a long chunk is not written": [(DENSE, WRITE, SHORTER)],
}


def conform(tmp_path: Path, *, cases: int, **environment: str) -> tuple[int, Any, Any]:
    """The command's exit code and JSON, and what the server says of its model."""
    save_tiny_model(tmp_path / "tiny")
    served = ("--model", tmp_path / "tiny", "--data-dir", tmp_path / "data", *SMALL)
    environment |= {"CACHESVC_CACHE__WEIGH_LOADS": "false", "OMP_NUM_THREADS": "1"}
    asked = ("--text", "--block", 16, "--longest", 50, "--cases", cases, "--json")
    with serve(tmp_path / "log", *served, **environment) as (_, url):
        ended = call("conform", url, *asked)
        model = httpx.get(f"{url}/v1/models").json()["data"][0]
    assert ended.stdout.startswith("{"), ended.output
    return ended.exit_code, json.loads(ended.stdout), model


def test_our_own_server_conforms_and_says_what_serves(tmp_path):
    code, told, model = conform(tmp_path, cases=200)
    assert (code, told["flips"], told["faults"]) == (0, 0, [])
    assert set(told["tiers"]) >= {"device", "host", "disk"}
    assert (told["serves"]["dtype"], told["serves"]["engine"]) == ("float32", "embedded")
    assert told["serves"] == model["exactness"]["serves"]


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
    code, told, _ = conform(tmp_path, cases=40, PYTHONPATH=str(site))
    assert code == 1 and told["faults"]
    assert told["flips"] > 0
