"""What depends on the device where nobody said how much."""

import pytest
import torch

from cachesvc.config.sections import EngineSection
from cachesvc.config.settings import Settings
from cachesvc.server import compute
from engine import hardware
from engine.errors import ModelError
from engine.hardware import CPU_CACHE_BYTES, spare_bytes
from tests.support.models import save_tiny_model

GIB = 1 << 30


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
