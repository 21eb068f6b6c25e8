"""A start keeps the narrow weights that it has found, and a later one reads them."""

import logging
import os
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from torch import nn

from engine.models.narrow_file import NarrowFile
from engine.models.packing import NarrowLinear, PackedLinear, pack
from tests.support.damage import DAMAGES, damage

pytestmark = pytest.mark.usefixtures("operators")

CHECKPOINT, KEY = bytes(16), "a1b2"
ROWS = torch.linspace(-1, 1, 5 * 64).view(1, 5, 64)


def loaded(*, narrow: bool = True, outputs: int = 96) -> nn.Module:
    """A model as it was loaded, whose second layer has a bias."""
    random = torch.Generator().manual_seed(7)
    layers = [nn.Linear(64, 64, bias=False), nn.Linear(64, outputs)]
    for layer in layers:
        weight = torch.randn(layer.weight.shape, generator=random)
        layer.weight = nn.Parameter(weight.bfloat16().float() if narrow else weight)
        if layer.bias is not None:
            layer.bias = nn.Parameter(torch.linspace(-1, 1, outputs))
    return nn.Sequential(nn.Sequential(layers[0]), layers[1]).requires_grad_(False)


def packed(model: nn.Module) -> nn.Module:
    pack(model, narrow=True)
    return model


def file_of(folder: Path, key: str = KEY, replaces_bytes: int = 1 << 20) -> NarrowFile:
    return NarrowFile(folder, CHECKPOINT, key, replaces_bytes=replaces_bytes)


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    """The file that a start has left."""
    file_of(tmp_path).write(packed(loaded()))
    [path] = tmp_path.iterdir()
    return path


def test_a_later_start_computes_the_same_and_finds_nothing(kept, monkeypatch):
    expected = packed(loaded())(ROWS)
    model = loaded()
    for parameter in list(model.parameters()):
        if parameter.dim() == 2:
            parameter.zero_()  # the checkpoint's weights are not needed

    monkeypatch.setattr(NarrowLinear, "_pack", Mock(side_effect=AssertionError("found again")))
    assert file_of(kept.parent).place(model)
    assert torch.equal(packed(model)(ROWS), expected)


def test_a_file_that_is_cut_under_a_server_takes_nothing_from_it(kept):
    """Memory mapped from a file ends the process where the file fails."""
    model = loaded()
    assert file_of(kept.parent).place(model)
    os.truncate(kept, 0)
    assert torch.equal(packed(model)(ROWS), packed(loaded())(ROWS))


@pytest.mark.parametrize("how", DAMAGES)
def test_a_damaged_file_is_not_read_and_is_made_again(kept, how, caplog):
    whole = kept.read_bytes()
    damage(kept, how)
    model = loaded()
    assert not file_of(kept.parent).place(model)
    assert str(kept) in caplog.text
    assert kept.exists() == (how == "folder"), "what is damaged takes no room"
    file_of(kept.parent).write(packed(model))
    if how != "folder":
        assert kept.read_bytes() == whole
        assert list(kept.parent.iterdir()) == [kept]


def test_other_operators_take_its_place(kept):
    other = file_of(kept.parent, key="ffff")
    model = loaded()
    assert not other.place(model)
    other.write(packed(model))
    assert not kept.exists()
    assert other.place(loaded())


def test_another_checkpoint_has_a_file_of_its_own(kept):
    other = NarrowFile(kept.parent, b"other checkpoint", KEY, replaces_bytes=1 << 20)
    assert not other.place(loaded())
    other.write(packed(loaded()))
    assert len(list(kept.parent.iterdir())) == 2


def test_a_layer_of_another_shape_keeps_its_own_weight(kept):
    model = loaded(outputs=128)
    file_of(kept.parent).place(model)
    assert torch.equal(packed(model)(ROWS), packed(loaded(outputs=128))(ROWS))


def test_kept_weights_whose_products_have_other_bits_are_packed(kept, monkeypatch):
    """Another oneDNN may add in another order."""
    model = loaded()
    file_of(kept.parent).place(model)
    monkeypatch.setattr("engine.models.packing._find_chain", lambda narrow, packed: None)
    pack(model, narrow=True)
    layers = [each for each in model.modules() if isinstance(each, PackedLinear)]
    assert [type(each) for each in layers] == [PackedLinear, PackedLinear]
    plain = loaded()
    pack(plain, narrow=False)
    assert torch.equal(model(ROWS), plain(ROWS))


def test_what_would_save_little_is_not_kept(tmp_path):
    model = packed(loaded())
    num_bytes = sum(each.numel() for each in model.buffers())
    file_of(tmp_path, replaces_bytes=2 * num_bytes - 1).write(model)
    file_of(tmp_path).write(packed(loaded(narrow=False)))
    assert not list(tmp_path.iterdir())
    file_of(tmp_path, replaces_bytes=2 * num_bytes).write(model)
    assert len(list(tmp_path.iterdir())) == 1


def test_the_last_room_of_a_disk_is_left_to_the_ledger(tmp_path, monkeypatch):
    model = packed(loaded())
    num_bytes = sum(each.numel() for each in model.buffers())
    free = [num_bytes + (1 << 30) - 1]
    monkeypatch.setattr(
        "shutil.disk_usage", lambda path: SimpleNamespace(total=1 << 40, used=0, free=free[0])
    )
    file_of(tmp_path).write(model)
    assert not list(tmp_path.iterdir())
    free[0] += 1
    file_of(tmp_path).write(model)
    assert len(list(tmp_path.iterdir())) == 1


def test_a_folder_that_cannot_be_written_ends_no_start(tmp_path, caplog):
    caplog.set_level(logging.WARNING)
    folder = tmp_path / "file"
    folder.touch()
    file_of(folder).write(packed(loaded()))
    assert "not kept" in caplog.text
