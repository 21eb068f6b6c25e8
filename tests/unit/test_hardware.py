"""What depends on the device where nobody said how much, warnings of caches that do not fit, and
memory that threads freed: it goes back to the system."""

from unittest.mock import Mock

import pytest
import torch

from cachesvc.config.errors import ConfigError
from cachesvc.config.sections import CacheSection, EngineSection, ModelSection, ServerSection
from cachesvc.config.settings import Settings
from cachesvc.server import compute
from cachesvc.server.compute import load, over
from cachesvc.server.memory import SpareMemory, full_caches, warn_of_limit
from engine import cgroups, hardware
from engine.cgroups import memory_limit
from engine.errors import ModelError
from engine.hardware import CPU_CACHE_BYTES, spare_bytes
from tests.support.models import save_tiny_model
from tiers.telemetry.events import EventStream

MIB, GIB = 1 << 20, 1 << 30


@pytest.mark.parametrize(
    ("free", "expected"),
    [(60 * GIB, 54 * GIB), (20 * GIB, 18 * GIB), (5 * GIB, 5 * GIB - hardware.STEP_BYTES)],
)
def test_a_gpu_gives_what_the_model_left_free_but_what_steps_need(free, expected, monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free, 80 * GIB))
    assert spare_bytes("cuda") == expected


def test_a_gpu_that_the_model_fills_is_refused_with_what_to_do(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (GIB, 80 * GIB))
    with pytest.raises(ModelError, match=r"leaves 1024 of 81920 MiB .* --device-cache"):
        spare_bytes("cuda")


def test_a_size_that_was_given_is_served_and_a_missing_one_is_told(tmp_path):
    save_tiny_model(tmp_path / "model")

    def served(**cache: int) -> Settings:
        named = {"model": {"name": str(tmp_path / "model")}, "server": {"data_dir": tmp_path}}
        return compute.prepare(Settings.model_validate({**named, "cache": cache}))[0]

    assert served(device_bytes=8 << 20).cache.device_bytes == 8 << 20
    assert served().cache.device_bytes == CPU_CACHE_BYTES
    assert served().engine.chunk_tokens == hardware.CPU_STEP_TOKENS


@pytest.mark.parametrize(
    ("given", "device", "expected"), [(0, "cpu", 512), (0, "cuda", 2048), (64, "cuda", 64)]
)
def test_a_step_of_a_gpu_is_large_enough_to_hide_its_launches(given, device, expected):
    settings = compute._engine_settings(EngineSection(chunk_tokens=given), device, ())
    assert expected == settings.scheduler.step_tokens == 4 * settings.scheduler.mixed_step_tokens


@pytest.mark.parametrize(
    ("capability", "expected"), [((7, 5), "float16"), ((8, 0), "bfloat16"), ((12, 0), "bfloat16")]
)
def test_a_gpu_that_does_not_multiply_bfloat16_computes_in_float16(
    capability, expected, monkeypatch
):
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: capability)
    assert expected == hardware.default_dtype("cuda")
    assert "float32" == hardware.default_dtype("cpu")


@pytest.mark.parametrize(("device", "expected"), [("cpu", True), ("cuda:0", False)])
def test_on_a_gpu_no_attention_is_planned_for_each_length(device, expected):
    before = torch.backends.cuda.cudnn_sdp_enabled()
    try:
        torch.backends.cuda.enable_cudnn_sdp(True)
        hardware.attend_without_plans(device)
        assert expected == torch.backends.cuda.cudnn_sdp_enabled()
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


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
    save_tiny_model(tmp_path / "model")
    loaded = load(ModelSection(name=str(tmp_path / "model"), device="cpu"), tmp_path)
    cache = CacheSection(device_bytes=MIB, host_bytes=GIB, disk_bytes=0)
    settings = Settings(cache=cache, server=ServerSection(data_dir=tmp_path))
    monkeypatch.setattr("tiers.blocks.frames.LazyMemory", Mock(side_effect=MemoryError))
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
