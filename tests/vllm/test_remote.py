"""A store with wrong values costs a vLLM request one load, and its answer is the same."""

from pathlib import Path

import pytest
from redis import Redis

from tests.redis_server import redis_server
from tests.vllm.conftest import started
from tests.vllm.processes import RunningNode
from tiers.disk.format.record import Header, unpack_header

pytestmark = [pytest.mark.vllm, pytest.mark.redis, pytest.mark.timeout(1800)]

BLOCK = 128
PROMPT = [(place * 7919 + 1) % 40_000 + 100 for place in range(1_000)]
WHOLE = (len(PROMPT) - 1) // BLOCK * BLOCK


def names_in_order(store: "Redis") -> list[bytes]:
    """The names of one prompt's blocks, from the first on."""
    after = {}
    for name in store.scan_iter("cachesvc/*"):
        header = unpack_header(store.get(name))
        assert isinstance(header, Header)
        after[header.parent] = (header.key, name)
    key = next(parent for parent in after if parent not in {key for key, _ in after.values()})
    names = []
    while key in after:
        key, name = after[key]
        names.append(name)
    return names


@pytest.mark.parametrize("good", [0, 2])
def test_records_of_other_blocks_are_computed_once_and_deleted(
    model: Path, tmp_path: Path, good: int
) -> None:
    """Valid records, each under the name of another block, as after a bug or by an attacker."""
    with redis_server(tmp_path) as url, Redis.from_url(url) as store:
        more = ("--remote-url", url, "--remote-writes", "all")
        one = RunningNode(tmp_path / "one", more=more)
        one.start()
        try:
            with started(model, one, tmp_path) as engine:
                (first,) = engine.generate(PROMPT)
                while one.pool()["remote"]["stored"] < WHOLE // BLOCK:
                    pass
        finally:
            one.kill()
        names = names_in_order(store)
        values = [store.get(name) for name in names]
        for name, value in zip(names[good:], values[good + 1 :] + values[:1], strict=False):
            store.set(name, value)  # type: ignore[arg-type]
        two = RunningNode(tmp_path / "two", more=more)
        two.start()
        try:
            with started(model, two, tmp_path) as engine:
                (answer,) = engine.generate(PROMPT)
                assert first["tokens"] == answer["tokens"]
                assert {"remote": good * BLOCK} == answer["hits"] or (
                    not good and not answer["hits"]
                )
                log = engine.log.read_text()
            assert 1 == log.count("Recovered from KV load failure")
            assert store.get(names[good]) != values[good + 1], "the wrong record is gone"
        finally:
            two.kill()
