"""`make gpu-check` runs where there is a GPU; tried here without one, so that it cannot rot."""

import json
from unittest.mock import Mock

import pytest

from tests.bench.gpu_check import __main__ as gpu_check
from tests.bench.gpu_check import attention, conform, parity, speed
from tests.children import ran


def test_the_check_runs_on_a_cpu(tmp_path):
    """All but the half minute of `conform`."""
    path = tmp_path / "made" / "figures.json"
    others = [part for part in gpu_check.PARTS if part != "conform"]
    gpu_check.main(["--device", "cpu", "--small", "--json", str(path), "--only", *others])
    figures = json.loads(path.read_text())
    assert figures["failed"] == []
    assert len(figures["parity"]) == 6
    assert {"bfloat16", "states", "recurrent", "lora", "grammar"} == set(figures["hits"])
    assert all(found["cold_tokens_equal"] for found in figures["hits"].values())
    assert len(figures["attention"]) == 7
    assert {"promote_share", "demote_share"} <= set(figures["copies"]["rates"])
    assert figures["copies"]["hashes"]["wrong_blocks"] == 0
    assert figures["copies"]["borders"]["wrong"] == 0
    assert figures["connector"]["wrong_slabs"] == 0
    assert set(figures["memory"]) == {"arena", "large_pool"}
    assert figures["speed"]["33_one_long"] > 0


@pytest.mark.slow
def test_a_server_on_a_cpu_conforms():
    figures = conform.check("cpu", small=True)["embedded"]
    assert figures["ok"] and figures["flips"] == 0 and figures["cases"] >= 200
    assert {"device", "host", "disk"} <= set(figures["tiers"])


def test_what_is_not_ok_fails_the_check_and_keeps_the_other_figures(tmp_path, monkeypatch):
    monkeypatch.setattr(attention, "check", Mock(side_effect=RuntimeError("no such kernel")))
    monkeypatch.setattr(parity, "check", lambda *_: [{"what": "qwen3", "ok": False}])
    monkeypatch.setattr(speed, "check", lambda *_: {"models": 1})
    path = tmp_path / "figures.json"
    with pytest.raises(SystemExit, match=r"parity: qwen3; attention: .*no such kernel"):
        gpu_check.main(
            ["--device", "cpu", "--json", str(path), "--only", "parity", "attention", "speed"]
        )
    assert json.loads(path.read_text())["speed"] == {"models": 1}


def test_it_asks_for_nothing_that_a_bare_machine_with_torch_may_lack():
    """The server's own dependencies are not there."""
    code = (
        "import sys\n"
        "for name in ('lmdb', 'gguf', 'peft', 'llguidance', 'sqlalchemy', 'fastapi'):\n"
        "    sys.modules[name] = None\n"
        "from tests.bench.gpu_check import __main__, attention, copies, memory, parity, speed\n"
    )
    ran(code)
