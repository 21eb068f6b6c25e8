"""Our disk as a secondary tier of vLLM's own offload, whose manager, keys and jobs are real."""

from importlib.metadata import entry_points
from pathlib import Path

import pytest

from tests.vllm.processes import NEXT, PYTHON, Offloading, connector

pytestmark = pytest.mark.vllm
COUNT = 32


@pytest.fixture(scope="module", params=["installed", "next"])
def vllm(tmp_path_factory, request):
    if not (PYTHON.exists() and NEXT.exists()):
        pytest.fail("there is no .venv-vllm, or no next version in it; run make test-vllm")
    running = Offloading(tmp_path_factory.mktemp("vllm") / "log", request.param)
    yield running
    running.close()


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """A model to this tier: files of which blocks depend."""
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text("{}")
    return folder


@pytest.fixture
def tier(tmp_path):
    return {"type": "cachesvc", "dir": str(tmp_path / "kv"), "bytes": "256MiB"}


@pytest.fixture
def opened(vllm, weights, tier):
    """Opens the tier, with other options where the test wants them."""

    def opened(**more):
        folder = str(more.pop("model", weights))
        engine = {name: more.pop(name) for name in ("dtype", "tp_size") if name in more}
        told = vllm("open", model=folder, tier=tier | more, **engine)
        assert {} == told, told
        return vllm

    return opened


def files_of(tier):
    return [each for each in Path(tier["dir"]).rglob("*") if each.is_file()]


def test_what_vllm_stores_comes_back_from_disk_after_a_restart(opened):
    engine = opened()
    engine("store", first=0, count=COUNT)
    for _ in range(2):
        loaded = engine("load", first=0, count=COUNT + 4)
        assert ([*range(COUNT)], []) == (loaded["hits"], loaded["wrong"])
        assert ["disk"] == loaded["sources"]
        engine("close")
        engine = opened()
    engine("close")


def test_after_a_reset_only_what_was_stored_since_is_found_until_the_next_start(opened):
    engine = opened()
    engine("store", first=0, count=4)
    engine("reset")
    assert [] == engine("load", first=0, count=4)["hits"]
    engine("store", first=2, count=4)
    assert [2, 3, 4, 5] == engine("load", first=0, count=6)["hits"]
    engine("close")
    engine = opened()
    assert [0, 1, 2, 3] == engine("load", first=0, count=6)["hits"], "of the files' weights"
    engine("close")


@pytest.mark.parametrize("what", ["files", "dtype", "ranks", "scope"])
def test_blocks_of_another_model_dtype_ranks_or_scope_are_not_found(opened, tmp_path, what):
    engine = opened()
    engine("store", first=0, count=4)
    engine("close")
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text('{"rope_theta": 1}')
    more = {"files": {"model": other}, "dtype": {"dtype": "float16"}}
    more |= {"ranks": {"tp_size": 2}, "scope": {"scope": "long"}}
    engine = opened(**more[what])
    assert [] == engine("load", first=0, count=4)["hits"]
    engine("close")
    engine = opened()
    assert [0, 1, 2, 3] == engine("load", first=0, count=4)["hits"]
    engine("close")


def test_damage_is_a_miss_of_what_it_hit_and_is_never_found_again(opened, tier):
    engine = opened()
    engine("store", first=0, count=COUNT)
    engine("close")
    data = max(files_of(tier), key=lambda each: each.stat().st_size)
    with data.open("r+b") as file:  # a page in the middle of a record
        file.seek(data.stat().st_size // 2)
        file.write(bytes(4096))
    engine = opened()
    first = engine("load", first=0, count=COUNT)
    assert [] == first["wrong"]
    [lost] = {*range(COUNT)} - {*first["hits"]}
    assert first["hits"] == engine("held", first=0, count=COUNT)
    again = engine("load", first=0, count=COUNT)
    assert (first["hits"], []) == (again["hits"], again["wrong"])
    engine("store", first=lost, count=1)
    assert [*range(COUNT)] == engine("load", first=0, count=COUNT)["hits"], "computed again"
    engine("close")


def test_it_is_bounded_and_keeps_what_was_used_last(opened, tier):
    engine = opened(bytes="64MiB", enable_kv_events=True)
    for first in range(0, 6 * COUNT, COUNT):
        engine("store", first=first, count=COUNT)
        engine("load", first=0, count=4)
    assert sum(each.stat().st_blocks * 512 for each in files_of(tier)) <= 64 << 20
    assert [0, 1, 2, 3] == engine("load", first=0, count=4)["hits"]
    assert [] == engine("load", first=COUNT, count=COUNT)["hits"]
    last = engine("load", first=5 * COUNT, count=COUNT)
    assert len(last["hits"]) > COUNT // 2 and not last["wrong"]
    held = engine("held", first=0, count=6 * COUNT)
    engine("load", first=0, count=1)
    events = engine("close")["events"]
    stored = sum(count for removed, count in events if not removed)
    gone = sum(count for removed, count in events if removed)
    assert stored - gone == len(held) < 4 * COUNT, "what left was told"


def test_killed_while_it_writes_it_serves_what_was_written_and_nothing_wrong(
    vllm, weights, tier, opened, tmp_path
):
    other = Offloading(tmp_path / "log", vllm.classes)
    assert {} == other("open", model=str(weights), tier=tier)
    other("store", first=0, count=COUNT)
    second = vllm("open", model=str(weights), tier=tier)
    assert "another server" in second["error"] or "dir of its own" in second["error"]
    other.tell("die", first=COUNT, count=COUNT)
    assert -9 == other.ended()
    other.close()
    engine = opened()
    loaded = engine("load", first=0, count=2 * COUNT)
    assert [*range(COUNT)] == loaded["hits"][:COUNT], "what had been written"
    assert [] == loaded["wrong"]
    engine("close")


def test_a_lookup_does_not_wait_for_a_disk_that_hangs(opened):
    engine = opened()
    waited = engine("hang")
    assert [] == waited["hits"]
    assert waited["seconds"] < 30
    engine("close")


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"type": "cachesvc", "bytes": "1GiB"}, "needs dir"),
        ({"type": "cachesvc", "dir": "kv", "bytes": "1GiB", "root_dir": "x"}, "knows no root_dir"),
        ({"type": "cachesvc", "dir": "kv", "bytes": "1GiB", "compress": 0}, "compress is true or"),
        ({"type": "cachesvc", "dir": "kv", "bytes": "1GiB", "enable_kv_events": 1}, "kv_events is"),
        ({"type": "cachesvc", "node": "/run/node.sock"}, "have CachesvcConnector"),
        ({"type": "cachesvc", "dir": "kv", "bytes": "much"}, "is not a size"),
        ({"type": "cachesvc", "dir": "kv", "bytes": "1MiB"}, "too small"),
    ],
)
def test_options_that_cannot_be_used_are_refused_by_name(vllm, weights, tmp_path, options, told):
    options = {**options, **({"dir": str(tmp_path / "kv")} if "dir" in options else {})}
    assert told in vllm("open", model=str(weights), tier=options)["error"]
    nothing = vllm("open", model=str(tmp_path), tier=options | {"bytes": "1GiB"})
    assert "error" in nothing


@pytest.mark.parametrize(
    ("engine", "told"),
    [
        ({"kv_role": "kv_consumer"}, '"kv_role": "kv_both"'),
        ({"kv_load_failure_policy": "fail"}, '"kv_load_failure_policy": "recompute"'),
        ({"even": False}, "(UniformTypeKVCacheSpecs)"),
        ({"prefixes": False}, "nothing is cached"),
    ],
)
def test_an_engine_that_the_connector_cannot_serve_is_refused_by_name(vllm, weights, engine, told):
    config = connector("/run/node.sock") | {"model": str(weights)} | engine
    assert told in vllm("connect", **config)["error"]


def test_the_connector_tells_orders_of_a_block_and_weights_that_no_file_has_apart(vllm, weights):
    config = connector("/run/node.sock") | {"model": str(weights)}
    one, *others = (
        vllm("connect", **config, **more)["layout"]
        for more in ({}, {"order": "LBNHC"}, {"load": "dummy"}, {"load": "safetensors"})
    )
    assert [False, False, True] == [one == other for other in others]


def test_vllm_finds_the_connector_and_the_tier_by_the_entry_point():
    found = {each.value for each in entry_points(group="vllm.general_plugins")}
    assert "cachesvc.vllm.plugin:register" in found
