"""What keeps a server from starting is found before torch is imported, and a wrong option is 2."""

import errno
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from cachesvc.cli.exits import exit_code
from cachesvc.config import places
from cachesvc.config.errors import ConfigError
from cachesvc.config.sections import CacheSection
from cachesvc.server.listen import check_memory, make_data_dir
from engine import driver
from engine.driver import check_device
from engine.errors import AdapterError, ModelError
from engine.models.files import check
from tests.support.stand_in import Handler, StandIn, served
from tests.terminal import on_a_terminal

SCRIPT = Path(sys.executable).with_name("cachesvc")


def run(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(SCRIPT), *words],
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ | {"COLUMNS": "80"} | variables,
    )


def test_a_network_file_system_is_warned_of(tmp_path, monkeypatch, caplog):
    mounts = tmp_path / "mounts"
    mounts.write_text(f"/dev/sda / ext4 rw 0 0\nserver:/x {tmp_path} nfs4 rw 0 0\n")
    monkeypatch.setattr(places, "MOUNTS", mounts)
    assert "ext4" == places.file_system(Path("/usr"))
    make_data_dir(tmp_path / "data")
    assert "is on nfs4: a command on another machine would damage the ledger" in caplog.text


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("serve", "--prot", "80"), "unexpected argument --prot; did you mean --port?"),
        (("serve", "--disk-cache-dir=/x"), "--disk-cache-dir was removed: join the disks"),
        (("serve", "--dtype", "float99"), "model.dtype = 'float99'"),
        (("serve", "--device-cache", "lots"), "cache.device_bytes = 'lots'"),
        (("serve", "--adapter", "sql"), "write NAME=SOURCE"),
        (("balance", "topup", "x", "ten"), "'ten' is not an amount of money"),
        (("tenants", "create", "a/b"), "a/b"),
        (("node", "--quota", "x"), "--quota 'x' is not a quota"),
        (("usage", "--by", "week"), "--by takes day and"),
        (("usage", "--format", "pdf"), "'--format': 'pdf' is not one of 'json'"),
        (("serve", "--port", "x"), "'--port': should be a valid integer"),
        (("node", "--events", '{"endpoint": 5}'), "}: endpoint should be a valid string"),
        (("top", "--dta-dir", "x"), "--data-dir"),
    ],
)
def test_a_wrong_command_line_is_exit_code_2_and_says_the_nearest(tmp_path, words, told):
    made = run("tenants", "create", "x", "--data-dir", str(tmp_path))
    assert 0 == made.returncode, made.stderr
    failed = run(*words, *(() if words[0] in {"node", "top"} else ("--data-dir", str(tmp_path))))
    assert (2, True) == (failed.returncode, told in failed.stderr), failed.stderr


def test_a_wrong_value_in_the_file_is_no_wrong_command_line(tmp_path):
    file = tmp_path / "c.toml"
    file.write_text('[model]\ndtype = "float99"\n')
    failed = run("serve", "--config", str(file), "--data-dir", str(tmp_path / "data"))
    assert 1 == failed.returncode, failed.stderr
    assert 1 == exit_code(ConfigError("x"))


@pytest.mark.parametrize("command", ["", "serve", "cache purge", "replay", "balance topup"])
def test_an_option_without_a_value_shows_no_type(command):
    shown = run(*command.split(), "--help").stdout
    assert "--help" in shown
    assert "bool" not in shown.lower()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--host-cache", "4TiB"), "--host-cache is 4 TiB, and this machine has"),
        (("--device", "cpu", "--device-cache", "4TiB"), "--device-cache is 4 TiB, and this"),
    ],
)
def test_a_tier_larger_than_memory_is_refused_before_torch(tmp_path, words, told):
    failed = run("serve", *words, "--data-dir", str(tmp_path))
    assert (1, True) == (failed.returncode, told in failed.stderr), failed.stderr
    assert "importing torch" not in failed.stderr


def test_beside_a_gpu_the_device_tier_is_not_in_this_memory():
    cache = CacheSection(device_bytes=1 << 50, host_bytes=1 << 20)
    check_memory(cache, on_gpu=True)
    with pytest.raises(ConfigError, match="--device-cache is 1024 TiB"):
        check_memory(cache, on_gpu=False)


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is here")
def test_a_missing_vllm_is_refused_before_torch(tmp_path):
    failed = run("serve", "--engine", "vllm", "--data-dir", str(tmp_path))
    assert 1 == failed.returncode
    assert "error: --engine vllm needs vLLM in this environment" in failed.stderr
    assert "importing torch" not in failed.stderr


@pytest.mark.skipif(driver._has_driver(), reason="a driver is here")
def test_cuda_without_a_driver_is_refused_before_torch(tmp_path):
    failed = run("serve", "--device", "cuda", "--data-dir", str(tmp_path))
    assert 1 == failed.returncode
    assert "error: no CUDA device can be used; run with --device cpu" in failed.stderr
    assert "importing torch" not in failed.stderr


def test_a_build_of_torch_for_cpus_has_no_cuda(monkeypatch):
    monkeypatch.setattr(driver, "_has_driver", lambda: True)
    monkeypatch.setattr(driver.metadata, "version", lambda name: "2.13.0+cpu")
    with pytest.raises(ModelError, match="no CUDA device"):
        check_device("cuda")
    monkeypatch.setattr(driver.metadata, "version", lambda name: "2.13.0")
    check_device("cuda")
    check_device("auto")


class Hub(Handler):
    """A hub with one model, one that is gated, and no others."""

    def do_GET(self) -> None:
        name = self.path.removeprefix("/api/models/").partition("?")[0]
        known = {"o/there": (200, ""), "o/gated": (403, "GatedRepo")}
        status, code = known.get(name, (401, "RepoNotFound"))
        body = {"id": name, "modelId": name, "siblings": [], "tags": []}
        self.say_json(body, status, {"X-Error-Code": code} if code else {})


@pytest.fixture
def hub(tmp_path, monkeypatch):
    import huggingface_hub.constants as constants
    import huggingface_hub.hf_api as hf_api

    with served(StandIn(Hub)) as server:
        monkeypatch.setattr(hf_api.constants, "ENDPOINT", server.url)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        yield


@pytest.mark.usefixtures("hub")
def test_a_hub_id_that_is_not_there_is_refused_at_once():
    check("o/there", {})
    with pytest.raises(ModelError, match="'o/none' is not on the hub"):
        check("o/none", {})
    with pytest.raises(ModelError, match="'o/gated' is gated: accept its terms"):
        check("o/gated", {})
    with pytest.raises(AdapterError, match="adapter sql: o/none is not on the hub"):
        check("o/there", {"sql": "o/none"})


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_found_at_the_start(tmp_path, monkeypatch, number):
    def full(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    make_data_dir(tmp_path)
    assert [] == list(tmp_path.iterdir())
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(ConfigError, match=r"is full, .* free some space"):
        make_data_dir(tmp_path)


def test_replay_cuts_no_figure_piped_or_in_a_narrow_window(tmp_path):
    trace = tmp_path / "t.jsonl"
    request = {"timestamp": 0, "input_length": 512 * 3, "hash_ids": [0, 1, 2]}
    trace.write_text("\n".join([json.dumps(request)] * 3))
    words = ["replay", str(trace), "--tiers", "device=1,host=1,disk=1"]
    piped = run(*words)
    assert 0 == piped.returncode, piped.stderr
    (figures,) = json.loads(run(*words, "--json").stdout)
    rate = f"{figures['hit_rate']:.4f}"
    for shown in (rate, "device", "host", "disk", "written to disk"):
        assert shown in piped.stdout
    with on_a_terminal(["env", "COLUMNS=50", str(SCRIPT), *words], tmp_path) as terminal:
        terminal.read_to_end()
        text = "\n".join(terminal.lines)
    assert rate in text
    assert "…" not in piped.stdout + text
    assert 50 >= max(len(line) for line in terminal.lines if rate in line)
    assert "not shown here, but in a wider window and with --json: of all" in text
