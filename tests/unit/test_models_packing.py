"""What packed layers keep in memory beside their weights."""

import gc
from pathlib import Path

import pytest

from engine.models.load import load_model
from tests.children import ran
from tests.support.models import save_tiny_model

PROGRAM = """
import os
from pathlib import Path

import torch

from engine.models.packing import PackedLinear


def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


torch.set_num_threads(1)
layers = [PackedLinear(torch.nn.Linear(width, 64)) for width in (64, 96)]
before = resident_bytes()
with torch.inference_mode():
    for rows in range(2, 500):
        for layer in layers:
            layer(torch.zeros(rows, layer.in_features))
print((resident_bytes() - before) >> 20)
"""


def test_kernels_of_many_row_counts_do_not_fill_the_memory():
    """oneDNN and ideep keep 1,024 each by default: 460 MB here, and for good."""
    assert int(ran(PROGRAM)) < 150


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="asks Linux what is mapped")
def test_a_packed_model_does_not_keep_its_file_in_memory(tmp_path):
    save_tiny_model(tmp_path / "model")
    weights = str(tmp_path / "model" / "model.safetensors")
    loaded = load_model(
        str(tmp_path / "model"), device="cpu", dtype="float32", cache_dir=tmp_path / "cache"
    )
    gc.collect()
    assert weights not in Path("/proc/self/maps").read_text()
    assert loaded.model.get_input_embeddings().weight.isfinite().all()
