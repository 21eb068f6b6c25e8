"""Warnings of caches that do not fit, and memory that threads freed: it goes back to the system."""

import pytest

from cachesvc.config.errors import ConfigError
from cachesvc.config.sections import CacheSection, ModelSection, ServerSection
from cachesvc.config.settings import Settings
from cachesvc.server.compute import load, over
from cachesvc.server.memory import SpareMemory, full_caches, warn_of_limit
from engine import cgroups
from engine.cgroups import memory_limit
from tests.support.models import save_tiny_model
from tiers.telemetry.events import EventStream

MIB, GIB = 1 << 20, 1 << 30


class Machine:
    """Its groups are files."""

    def __init__(self, path):
        self.root, self.groups = path / "groups", path / "cgroup"

    def put(self, place, text):
        file = self.root / place
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")


@pytest.fixture
def machine(tmp_path, monkeypatch):
    made = Machine(tmp_path)
    monkeypatch.setattr(cgroups, "ROOT", made.root)
    monkeypatch.setattr(cgroups, "OWN", made.groups)
    return made


def test_no_groups_and_no_limits_are_none(machine):
    assert memory_limit() is None
    machine.groups.write_text("0::/a/b\n")
    assert memory_limit() is None
    machine.put("a/b/memory.max", "max")
    machine.put("a/memory.max", "")
    assert memory_limit() is None
    machine.groups.write_text("nothing known\n")
    assert memory_limit() is None


def test_the_lowest_limit_of_the_groups_of_version_2_counts(machine):
    machine.groups.write_text("0::/a/b\n")
    machine.put("a/b/memory.max", "max")
    machine.put("a/memory.max", str(3 * GIB))
    assert 3 * GIB == memory_limit()
    machine.put("memory.max", str(2 * GIB))
    assert 2 * GIB == memory_limit()
    machine.put("../memory.max", "1")
    assert 2 * GIB == memory_limit(), "not a group"


def test_the_limit_of_version_1_is_found_where_the_groups_path_is_out_of_sight(machine):
    machine.groups.write_text("3:cpu,cpuacct:/docker/1\n2:hugetlb,memory:/docker/1\n0::/\n")
    machine.put("memory/memory.limit_in_bytes", str((1 << 63) - 4096))
    assert memory_limit() is None
    machine.put("memory/memory.limit_in_bytes", str(2 * GIB))
    assert 2 * GIB == memory_limit()
    machine.put("memory/docker/1/memory.limit_in_bytes", str(GIB))
    assert GIB == memory_limit()


def test_a_start_says_that_full_caches_exceed_the_limit_or_the_machine(
    machine, monkeypatch, caplog
):
    cache = CacheSection(device_bytes=768 * MIB, host_bytes=GIB)
    machine.groups.write_text("0::/\n")
    machine.put("memory.max", str(64 * GIB))
    warn_of_limit(full_caches(cache, on_gpu=False))
    assert not caplog.text
    machine.put("memory.max", str(GIB))
    warn_of_limit(full_caches(cache, on_gpu=False))
    [said] = caplog.messages
    assert "control group is 1 GiB" in said and "lower --host-cache (1 GiB)" in said
    caplog.clear()
    monkeypatch.setattr("cachesvc.server.memory.total_bytes", lambda: 2 * GIB)
    machine.put("memory.max", str(4 * GIB))
    warn_of_limit({"--host-cache": 3 * GIB})
    [said] = caplog.messages
    assert "the memory of this machine is 2 GiB" in said and "lower --host-cache (3 GiB)" in said


@pytest.mark.parametrize(
    ("on_gpu", "node_bytes", "named"),
    [
        (True, 2 * GIB, "--host-cache (2 GiB)"),
        (False, 2 * GIB, "--device-cache (3 GiB)"),
        (False, 4 * GIB, "--host-cache (4 GiB)"),
    ],
)
def test_of_vllm_the_nodes_memory_counts_and_on_a_cpu_its_own_cache(
    machine, caplog, on_gpu, node_bytes, named
):
    cache = CacheSection(device_bytes=3 * GIB, host_bytes=GIB)
    machine.groups.write_text("0::/\n")
    machine.put("memory.max", str(2 * GIB))
    warn_of_limit(full_caches(cache, on_gpu=on_gpu, node_bytes=node_bytes))
    [said] = caplog.messages
    assert f"lower {named}, or" in said


def test_caches_that_the_system_refuses_name_the_option(tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise MemoryError

    save_tiny_model(tmp_path / "model")
    loaded = load(ModelSection(name=str(tmp_path / "model"), device="cpu"), tmp_path)
    cache = CacheSection(device_bytes=MIB, host_bytes=GIB, disk_bytes=0)
    settings = Settings(cache=cache, server=ServerSection(data_dir=tmp_path))
    monkeypatch.setattr("tiers.blocks.frames.LazyMemory", refuse)
    with pytest.raises(ConfigError, match=r"memory of this machine: lower --host-cache \(1 GiB\)"):
        over(loaded, settings)(lambda outputs: None, EventStream(), None)


def test_growth_is_counted_from_the_least_since_the_last_return() -> None:
    sizes, trims = iter([500, 620, 400, 520, 530, 410, 530]), []
    memory = SpareMemory(
        128 * MIB, resident=lambda: next(sizes) * MIB, trim=lambda pad: trims.append(pad) or 1
    )
    trimmed = []
    for _ in range(6):
        memory.give_back()
        trimmed.append(len(trims))
    assert [0, 0, 0, 0, 1, 1] == trimmed
