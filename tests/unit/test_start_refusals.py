"""What keeps a server from starting is found before torch is imported, and a wrong option is 2."""

import errno
import importlib.util
import json
import os
import socket
import stat
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest

from cachesvc.config import places
from cachesvc.config.errors import ConfigError
from cachesvc.config.places import disk_path
from cachesvc.config.sections import CacheSection
from cachesvc.server.listen import check_memory, make_data_dir
from engine import driver
from engine.driver import check_device
from engine.errors import AdapterError, ModelError
from engine.models.files import check
from tests.support.commands import said
from tests.support.stand_in import Handler, StandIn, served
from tiers.disk.directory import DirectoryLock
from tiers.errors import DirectoryLocked


def test_a_network_file_system_is_warned_of(tmp_path, monkeypatch, caplog):
    mounts = tmp_path / "mounts"
    mounts.write_text(f"/dev/sda / ext4 rw 0 0\nserver:/x {tmp_path} nfs4 rw 0 0\n")
    monkeypatch.setattr(places, "MOUNTS", mounts)
    assert "ext4" == places.file_system(Path("/usr"))
    make_data_dir(tmp_path / "data")
    assert "is on nfs4: a command on another machine would damage the ledger" in caplog.text


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("serv", "serve"),
        ("serve --prot 80", "unexpected argument --prot; did you mean --port?"),
        ("serve --disk-cache-dir=/x", "--disk-cache-dir was removed: join the disks"),
        ("serve --dtype float99", "model.dtype = 'float99'"),
        ("serve --device tpu", "model.device = 'tpu' (from flag)"),
        ("serve --disk-cache 12x", "is not a size; write it like 64MiB"),
        ("serve --disk-cache 64", "64B is less than 1MiB; write it with its unit, like 8GiB"),
        ("serve --device-cache 4", "4B is less than 1MiB"),
        ("serve --host-cache 700KB", "is less than 1MiB"),
        ("serve --device-cache lots", "cache.device_bytes = 'lots'"),
        ("serve --adapter sql", "write NAME=SOURCE"),
        ("serve --port x", "'--port': should be a valid integer"),
        ("serve --port 70000", "server.port = 70000 (from flag)"),
        ("balance topup x ten", "'ten' is not an amount of money"),
        ("tenants create a/b", "a/b"),
        ("node --quota x", "--quota x: write NAME=SIZE"),
        ("usage --by week", "--by takes day and"),
        ("usage --format pdf", "'--format': 'pdf' is not one of 'json'"),
        ('node --events {"endpoint":5}', "endpoint: should be a valid string"),
        ("node --events {", "write an address, or a table like"),
        ("node --remote-writes none", "cache.remote_writes = 'none' (from flag)"),
        ("top --dta-dir x", "--data-dir"),
    ],
)
def test_a_wrong_command_line_is_exit_code_2_and_says_the_nearest(tmp_path, words, says):
    where = () if words.split()[0] in {"node", "top", "serv"} else ("--data-dir", tmp_path)
    said("tenants", "create", "x", "--data-dir", tmp_path)
    assert says in said(*words.split(), *where, code=2, env={"COLUMNS": "200"})


@pytest.mark.parametrize("host", ["0.0.0.0", "no.such.host.invalid"])
def test_a_server_that_anybody_may_reach_needs_keys(tmp_path, host):
    refused = said("serve", "--data-dir", tmp_path, "--host", host, code=1)
    assert "listens on loopback only" in refused


def test_a_wrong_value_in_the_file_is_no_wrong_command_line(tmp_path):
    file = tmp_path / "c.toml"
    file.write_text('[model]\ndtype = "float99"\n')
    assert "float99" in said("serve", "--config", file, "--data-dir", tmp_path / "data", code=1)


@pytest.mark.parametrize("command", ["", "serve", "cache purge", "replay", "balance topup"])
def test_an_option_without_a_value_shows_no_type(command):
    shown = said(*command.split(), "--help")
    assert "--help" in shown and "bool" not in shown.lower()


CHILD = """
import json, os, sys
from cachesvc.cli import app
for words, variables in json.load(sys.stdin):
    os.environ.update(variables)
    sys.stderr.flush()
    os.ftruncate(2, 0)
    os.lseek(2, 0, 0)
    try: app(words)
    except SystemExit as left: code = left.code
    for name in variables: del os.environ[name]
    sys.stderr.flush()
    told = os.pread(2, 1 << 20, 0).decode()
    print(json.dumps([told, code, "torch" in sys.modules]), flush=True)
"""


def refusals(folder, *asked):
    """What `serve` says as it ends, each time in one process where torch is never imported."""
    words = [["serve", "--port", "0", *map(str, flags)] for flags, _ in asked]
    given = json.dumps([[each, names] for each, (_, names) in zip(words, asked, strict=True)])
    command, pipe = [sys.executable, "-c", CHILD], subprocess.PIPE
    with (folder / "stderr").open("w+") as told:
        ended = subprocess.run(
            command, input=given, stdout=pipe, stderr=told, text=True, timeout=110
        )
    lines = [json.loads(line) for line in ended.stdout.splitlines() if line.startswith("[")]
    assert [(1, False)] * len(asked) == [(code, torch) for _, code, torch in lines], ended
    return [heard for heard, _, _ in lines]


def refused(data_dir, *flags):
    return refusals(data_dir, (("--data-dir", data_dir, *flags), {}))[0]


FTP, NOWHERE = "ftp://127.0.0.1/blocks", "redis://127.0.0.1:1"


UNSERVED = [  # flags, variables, and what is said
    ("--model no-such-model", {}, "no model 'no-such-model'"),
    ("--model HERE/nothing", {}, "it is not an alias"),
    ("--model HERE", {}, "holds no config.json and no GGUF file"),
    (f"--model {__file__}", {}, "is neither a folder nor a .gguf file"),
    ("--adapter sql=HERE/nothing", {}, "adapter sql: there is no folder"),
    ("", {"REMOTE_URL": FTP}, "no remote tier uses 'ftp'"),
    ("--disk-cache 0", {"REMOTE_URL": NOWHERE}, "cache.remote_url needs the disk tier"),
    ("", {"REMOTE_URL": NOWHERE, "REMOTE_KEY_FILE": "/no/key"}, "key file /no/key cannot be"),
    ("--host-cache 4TiB", {}, "--host-cache is 4 TiB, and this machine has"),
    ("--device cpu --device-cache 4TiB", {}, "--device-cache is 4 TiB, and this machine has"),
]
if importlib.util.find_spec("vllm") is None:
    UNSERVED.append(("--engine vllm", {}, "--engine vllm needs vLLM in this environment"))
if not driver._has_driver():
    UNSERVED.append(("--device cuda", {}, "no CUDA device can be used; run with --device cpu"))


def test_what_cannot_be_served_is_refused_before_torch_is_imported(tmp_path):
    asked = []
    for number, (flags, variables, _) in enumerate(UNSERVED):
        words = flags.replace("HERE", str(tmp_path)).split()
        words += "--data-dir", tmp_path / str(number)
        asked.append((words, {f"CACHESVC_CACHE__{name}": each for name, each in variables.items()}))
    found = zip(UNSERVED, refusals(tmp_path, *asked), strict=True)
    assert [] == [(case, heard) for case, heard in found if case[-1] not in heard]


def test_a_port_or_a_data_directory_in_use_is_refused_before_torch_is_imported(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert "choose another --port" in refused(tmp_path, "--port", port)
    disk_path(tmp_path).mkdir()
    lock = DirectoryLock(disk_path(tmp_path))
    try:
        assert "served by pid" in refused(tmp_path)
        with pytest.raises(DirectoryLocked, match="served by pid"):
            make_data_dir(tmp_path)
    finally:
        lock.release()


def test_a_data_directory_is_private_and_can_be_written(tmp_path, monkeypatch):
    make_data_dir(tmp_path / "data")
    assert 0o700 == stat.S_IMODE((tmp_path / "data").stat().st_mode)
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="is a file; --data-dir names a folder"):
        make_data_dir(tmp_path / "file")
    with pytest.raises(ConfigError, match=r"cannot make .*; check --data-dir"):
        make_data_dir(tmp_path / "file" / "below")
    monkeypatch.setattr("os.access", lambda path, mode: False)  # tests may run as root
    with pytest.raises(ConfigError, match="this user cannot write"):
        make_data_dir(tmp_path / "of-another")


def test_beside_a_gpu_the_device_tier_is_not_in_this_memory():
    cache = CacheSection(device_bytes=1 << 50, host_bytes=1 << 20)
    check_memory(cache, on_gpu=True)
    with pytest.raises(ConfigError, match="--device-cache is 1024 TiB"):
        check_memory(cache, on_gpu=False)


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
    full = Mock(side_effect=OSError(number, os.strerror(number)))
    make_data_dir(tmp_path)
    assert [] == list(tmp_path.iterdir())
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(ConfigError, match=r"is full, .* free some space"):
        make_data_dir(tmp_path)
