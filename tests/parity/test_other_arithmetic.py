"""A data directory that another processor, or an older version, filled: misses with a reason."""

import queue
from dataclasses import replace
from types import SimpleNamespace

import pytest

from cachesvc.config.sections import CacheSection, ServerSection
from cachesvc.config.settings import Settings
from cachesvc.operator.scopes import note_scopes
from cachesvc.server.compute import build
from engine.models.arithmetic import Arithmetic
from engine.request import SamplingParams
from tests.support.models import tiny_model
from tests.support.requests import request
from tiers.errors import MissReason
from tiers.telemetry.events import EventStream

MIB = 1 << 20
PROMPT = [7 * number % 250 for number in range(100)]


def asked(loaded, folder, *, older=False):
    """The first output for the prompt, of a server's life over `folder`. It flushes at its end."""
    outputs = queue.Queue()
    cache = CacheSection(
        block_size=16, device_bytes=MIB, host_bytes=MIB, disk_bytes=64 * MIB, weigh_loads=False
    )
    settings = Settings(cache=cache, server=ServerSection(data_dir=folder))
    core = build(loaded, settings, lambda several: [*map(outputs.put, several)], EventStream())
    scope = replace(core.scope, arithmetic=b"") if older else core.scope
    note_scopes(folder, [SimpleNamespace(name="tiny", scope=scope)])
    core.start()
    try:
        params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
        core.engine.submit(request(PROMPT, params=params, scope=scope))
        return outputs.get(timeout=60)
    finally:
        assert core.close() == 0


@pytest.mark.parametrize("older", [False, True])
def test_blocks_of_another_processor_or_version_are_misses_with_a_reason(tmp_path, older, caplog):
    mine = tiny_model()
    theirs = replace(mine, arithmetic=Arithmetic((("vendor_id", "another"),)))
    first = asked(mine if older else theirs, tmp_path, older=older)
    assert set(first.miss_reasons) == {MissReason.ABSENT, MissReason.TAIL}
    with caplog.at_level("INFO"):
        there = asked(mine, tmp_path)
    assert there.counts is not None and there.counts.hit == 0
    assert there.miss_reasons == {MissReason.ARITHMETIC: 96, MissReason.TAIL: 4}
    assert there.lookup is not None and there.lookup.stop is MissReason.ARITHMETIC
    assert "another processor" in caplog.text
    again = asked(mine, tmp_path)
    assert again.counts is not None and again.counts.hit_disk == 96
