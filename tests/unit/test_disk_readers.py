"""How many threads read the disks: by disks and processors, and as many do read at once."""

import threading
from contextlib import closing
from pathlib import Path

import pytest

from tests.support.chain_runner import chain_layout
from tiers.disk import readers
from tiers.disk.array import open_array
from tiers.disk.open import open_disk
from tiers.disk.readers import readers_for
from tiers.tier import ManagedTier
from tiers.transfer.mover import Mover, ProbeJob


@pytest.mark.parametrize(
    ("disks", "cpus", "expected"),
    [
        (1, 1, 2),
        (1, 2, 2),
        (1, 8, 2),
        (1, 16, 4),
        (1, 192, 4),
        (2, 16, 4),
        (4, 192, 16),
        (0, 64, 2),
    ],
)
def test_four_read_a_disk_on_a_quarter_of_the_processors(
    disks: int, cpus: int, expected: int
) -> None:
    assert expected == readers_for(disks, cpus)


@pytest.mark.parametrize("count", [1, 3])
def test_as_many_threads_read_at_once(
    count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        readers, "os", type("Machine", (), {"sched_getaffinity": lambda _: [0] * 64})
    )
    layout = chain_layout(4)
    roots = [tmp_path / str(number) for number in range(count)]
    met = threading.Barrier(4 * count)

    class Meeting(ProbeJob):
        def run(self, tier: ManagedTier) -> None:
            met.wait(10)

    opened = open_array(roots, lambda root: open_disk(root, layout, 64 << 20))
    with closing(opened) as tier:
        mover = Mover(tier)
        mover.start()
        jobs = [Meeting([]) for _ in range(4 * count)]
        assert all(mover.submit(job) for job in jobs)
        mover.close()
    assert not met.broken
