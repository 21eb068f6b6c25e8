"""A later start takes the forward that an earlier one recorded, and computes the same bits."""

import logging
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.batch import Batch
from engine.execution import kept_graphs
from engine.execution.kept_graphs import KeptGraphs
from engine.execution.runner import ModelRunner
from engine.execution.traced import TracedForward
from engine.models.load import LoadedModel
from engine.operators.library import Operators
from engine.torchscript import undeprecated
from tests.parity.test_traced import BLOCK, STEPS, forward
from tests.support.damage import DAMAGES, damage
from tests.support.models import ARCHITECTURES, new_pool, tiny_model

WEIGHTS = bytes(16)


def graphs(folder: Path) -> KeptGraphs:
    return KeptGraphs(folder, WEIGHTS)


def recorded(folder: Path, loaded: LoadedModel, *, fused: bool = False) -> TracedForward:
    return TracedForward(loaded.model, fused=fused, kept=graphs(folder))


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> Callable[..., TracedForward]:
    """The same, where recording fails."""

    def take(folder: Path, loaded: LoadedModel, *, fused: bool = False) -> TracedForward:
        with monkeypatch.context() as patch:
            patch.setattr("torch.jit.trace", _trace)
            return recorded(folder, loaded, fused=fused)

    return take


def _trace(*_: Any, **__: Any) -> None:
    raise AssertionError("recorded again")


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return tiny_model("llama")


@pytest.fixture
def kept(loaded: LoadedModel, tmp_path: Path) -> Path:
    """The file that a start has left."""
    recorded(tmp_path, loaded)
    [path] = tmp_path.iterdir()
    return path


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_kept_graph_computes_the_bits_of_a_recorded_one(
    architecture: str,
    fused: bool,
    operators: Operators,
    tmp_path: Path,
    taken: Callable[..., TracedForward],
) -> None:
    loaded = tiny_model(architecture)
    pools = [new_pool(loaded, 40, BLOCK) for _ in range(2)]
    pools[1].copy_(pools[0])
    first, later = (ModelRunner(loaded, pool) for pool in pools)
    first._traced = recorded(tmp_path, loaded, fused=fused)
    later._traced = taken(tmp_path, loaded, fused=fused)
    for name in ("num_operators", "activates_by_row", "computes_one_row", "_kind"):
        assert getattr(first._traced, name) == getattr(later._traced, name), name
    for inside in (True, False):  # and through Python
        for runner in (first, later):
            for attention in runner._picked:
                if fused:
                    attention.fuse()
                if not inside:
                    attention.inside_step = lambda: None
        for step in STEPS:
            with torch.inference_mode():
                expected, actual = forward(first, step), forward(later, step)
            assert expected is not None and actual is not None
            assert torch.equal(expected, actual)
    assert torch.equal(*(pool.nan_to_num(7) for pool in pools))


def test_a_runner_keeps_what_it_records(
    loaded: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keeping, told = replace(loaded, recordings=tmp_path), []
    for _ in range(2):
        runner = ModelRunner(keeping, new_pool(loaded, 40, BLOCK))
        runner.warm_up()
        assert runner._traced is not None
        told.append([[each.token for each in runner.step(Batch(step))] for step in STEPS])
        monkeypatch.setattr("torch.jit.trace", _trace)
    assert told[0] == told[1]


def test_a_file_has_no_weights_and_its_graph_no_copies(
    kept: Path, loaded: LoadedModel, taken: Callable[..., TracedForward]
) -> None:
    with undeprecated():
        bare = torch.jit.load(kept)
    assert sum(each.numel() for each in bare.buffers()) == 0
    own = {id(each) for each in (*loaded.model.parameters(), *loaded.model.buffers())}
    places = {each.data_ptr() for each in loaded.model.parameters()}
    graph = taken(kept.parent, loaded)._graph
    bound = [each for _, each in graph.named_buffers(recurse=False)]
    assert len(bound) == len(own)
    assert places <= {each.data_ptr() for each in bound if each.layout == torch.strided}


def test_a_graph_with_the_models_numbers_is_not_kept(
    loaded: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept_graphs, "_MOST_BYTES", 1000)
    recorded(tmp_path, loaded)
    assert not list(tmp_path.iterdir())


def test_a_graph_of_another_version_is_recorded_again_and_replaced(
    kept: Path, loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept_graphs.transformers, "__version__", "5.99.0")
    assert graphs(kept.parent).read(loaded.model, None) is None
    recorded(kept.parent, loaded)
    [path] = kept.parent.iterdir()
    assert path != kept


def test_a_layer_that_is_set_otherwise_has_another_graph(
    kept: Path, loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where another oneDNN adds in other chains."""
    assert graphs(kept.parent).read(loaded.model, None) is not None
    monkeypatch.setattr(loaded.model.base_model.norm, "variance_epsilon", 1e-4)
    assert graphs(kept.parent).read(loaded.model, None) is None


def test_operators_and_other_weights_have_graphs_of_their_own(
    kept: Path, loaded: LoadedModel
) -> None:
    assert graphs(kept.parent).read(loaded.model, ["norm"]) is None
    assert KeptGraphs(kept.parent, b"another's digest").read(loaded.model, None) is None


def test_a_kept_graph_with_other_bits_is_recorded_again(
    kept: Path,
    loaded: LoadedModel,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    taken: Callable[..., TracedForward],
) -> None:
    name = kept.stem.rpartition("-")[0]
    with monkeypatch.context() as patch:
        patch.setattr(loaded.model.base_model.norm, "variance_epsilon", 1e-2)
        patch.setattr(KeptGraphs, "_name", lambda *_: name)
        kept.unlink()
        recorded(kept.parent, loaded)
    [other] = kept.parent.iterdir()
    assert other != kept
    recorded(kept.parent, loaded)
    assert "the logits of 2 tokens are others" in caplog.text
    assert not other.exists()
    taken(kept.parent, loaded)


@pytest.mark.parametrize("how", DAMAGES)
def test_a_damaged_file_is_recorded_again(
    kept: Path,
    how: str,
    loaded: LoadedModel,
    caplog: pytest.LogCaptureFixture,
    taken: Callable[..., TracedForward],
) -> None:
    damage(kept, how)
    recorded(kept.parent, loaded)
    assert str(kept) in caplog.text
    taken(kept.parent, loaded)
    assert len(list(kept.parent.iterdir())) == (2 if how == "folder" else 1)


@pytest.mark.parametrize("mode", [0o660, 0o606])
def test_a_file_that_others_may_write_is_not_read(
    kept: Path, mode: int, loaded: LoadedModel, caplog: pytest.LogCaptureFixture
) -> None:
    kept.chmod(mode)
    assert graphs(kept.parent).read(loaded.model, None) is None
    assert "another user could have written it" in caplog.text
    recorded(kept.parent, loaded)
    [path] = kept.parent.iterdir()
    assert path.stat().st_mode & 0o777 == 0o600
    assert graphs(kept.parent).read(loaded.model, None) is not None


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives a file away")
@pytest.mark.parametrize("what", ["file", "folder"])
def test_another_users_file_is_not_read(kept: Path, what: str, loaded: LoadedModel) -> None:
    os.chown(kept if what == "file" else kept.parent, 12345, -1)
    assert graphs(kept.parent).read(loaded.model, None) is None


def test_a_folder_that_cannot_be_written_ends_no_start(
    tmp_path: Path, loaded: LoadedModel, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    folder = tmp_path / "file"
    folder.touch()
    recorded(folder, loaded)
    assert "not kept" in caplog.text
