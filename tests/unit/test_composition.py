"""A composed engine: what a failed start and a close leave behind, and what compiling gives it."""

import gc
import threading
import weakref
from unittest.mock import Mock

import pytest

from engine.execution.runner import ModelRunner
from engine.models import load
from engine.models.load import load_model
from engine.operators import library
from engine.request import SamplingParams
from tests.support.composed import Composed
from tests.support.models import save_tiny_model
from tiers.disk.format import planes
from tiers.errors import ConfigurationError

PROMPT = list(b"the quick brown fox jumps over the lazy dog; " * 3)
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    save_tiny_model(folder)
    return folder


def loaded(model, dtype="float32"):
    return load_model(str(model), device="cpu", dtype=dtype, cache_dir=model)


def test_a_closed_engine_leaves_no_memory_behind(model, tmp_path, freezes):
    with Composed(loaded(model), tmp_path) as composed:
        composed.ask(PROMPT, GREEDY)
        parts = [weakref.ref(part) for part in (composed.core.engine, composed.core.loaded.model)]
    del composed
    gc.collect()
    assert [None, None] == [part() for part in parts]


def test_an_engine_that_cannot_be_made_closes_its_tiers(model, tmp_path, monkeypatch):
    before = {*threading.enumerate()}
    with monkeypatch.context() as failing:
        failing.setattr(ModelRunner, "record", Mock(side_effect=MemoryError))
        with pytest.raises(MemoryError):
            Composed(loaded(model), tmp_path, disk_bytes=16 << 20)
    with pytest.raises(ConfigurationError, match="holds 0 blocks"):
        Composed(loaded(model), tmp_path, device_bytes=10, disk_bytes=16 << 20)
    assert {*threading.enumerate()} <= before
    Composed(loaded(model), tmp_path, disk_bytes=16 << 20).close()  # the directory is free again


def test_closing_ends_a_compiler_that_is_at_work(model, tmp_path, monkeypatch):
    program = tmp_path / "c++"
    program.write_text("#!/bin/sh\nsleep 600\n")
    program.chmod(0o755)
    monkeypatch.setattr(library, "COMPILERS", (str(program),))
    monkeypatch.setattr(load, "BUILT", None)
    monkeypatch.setattr(load, "_COMPILED_FROM_BYTES", 0)
    monkeypatch.setattr(library.Operators, "load", lambda self: False)
    with Composed(loaded(model), tmp_path) as composed:
        operators = composed.core.loaded.operators
        if operators.missing is not None:
            pytest.skip(operators.missing)
        compiling = operators._compiling
        assert compiling is not None and compiling.end.alive
    assert not compiling.end.alive


@pytest.mark.parametrize(("dtype", "fuses"), [("float32", True), ("bfloat16", False)])
def test_compiled_functions_expand_records_of_every_dtype(
    model, tmp_path, operators, monkeypatch, dtype, fuses
):
    """A forward calls operators in float32 alone, and the disk's records have any dtype."""
    monkeypatch.setattr(load, "_COMPILED_FROM_BYTES", 0)
    monkeypatch.setattr(load, "Operators", lambda *folders: operators)
    monkeypatch.setattr(planes, "_compiled", {})
    with Composed(loaded(model, dtype), tmp_path, disk_bytes=64 << 20) as composed:
        composed.ask(PROMPT, GREEDY)
        assert {2, 4} == planes._compiled.keys()
        assert fuses == composed.core.loaded.fuses
        traced = composed.core.runner._traced
        assert traced is not None and fuses == traced.activates_by_row
