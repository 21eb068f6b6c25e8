"""Whether records are compressed follows from measured rates, and from nothing else."""

import random
from contextlib import closing

import pytest

from tests.support.faulty_storage import chain, fetched, put, take
from tests.support.threads import beside
from tiers.blocks.frames import FrameArena
from tiers.blocks.layout import BlockLayout
from tiers.disk import rates
from tiers.disk.format.codec import CodecId
from tiers.disk.format.record import Header, unpack_header
from tiers.disk.open import open_disk
from tiers.disk.rates import DiskRates, RateMeter
from tiers.disk.settings import DiskSettings

LAYOUT = BlockLayout.uniform(2, 64, 2, 64, "bfloat16")
COUNT = 4
GB = 1e-9  # seconds a GB, as seconds a byte
BUSY = DiskRates(read_s=0.1 * GB, expand_s=1.2 * GB, saved=0.3, compute_s=0.4 * GB)


def test_records_stay_uncompressed_where_expanding_is_slower_than_the_disk():
    """A GB takes 0.3 s to expand with four readers and 0.1 to read whole; the hits lost are 0.3 of
    0.4 - 0.1."""
    assert BUSY.favour_raw(4)
    assert not BUSY._replace(expand_s=0.26 * GB).favour_raw(4)  # an idle processor expands 15 GB/s
    assert BUSY._replace(expand_s=0.8 * GB).favour_raw(2)
    assert not BUSY._replace(read_s=0.5 * GB).favour_raw(4)  # the disk is slower than the codec


def test_where_computing_takes_long_room_is_worth_more_than_speed():
    assert not BUSY._replace(compute_s=1.0 * GB).favour_raw(4)
    assert not BUSY._replace(compute_s=100 * GB).favour_raw(4)


@pytest.mark.parametrize("unknown", DiskRates._fields)
def test_until_all_is_measured_records_are_compressed(unknown):
    assert not BUSY._replace(**{unknown: 0.0}).favour_raw(4)


@pytest.mark.parametrize("saved", [0.02, 0.15, 0.31, 0.5])
def test_raw_never_costs_more_than_the_lost_room_could_have_served(saved):
    """For every set of rates on a grid: where raw is chosen, a hit and its share of misses take
    less time than compressed hits, although the share `saved` of them is computed."""
    chosen = 0
    grid = [0.03, 0.1, 0.3, 1.0, 3.0]
    for read in grid:
        for expand in grid:
            for compute in grid:
                if not DiskRates(read, expand, saved, compute).favour_raw(4):
                    continue
                chosen += 1
                raw_s = (1 - saved) * read + saved * max(compute, read)
                assert raw_s < max((1 - saved) * read, expand / 4)
    assert chosen


def test_rates_that_vary_change_the_choice_once_and_not_with_each_count():
    """A slow drift of the processors' speed, with noise of a tenth on each count."""
    dice, meter, changes = random.Random(1), RateMeter(4), [False]
    for number in range(4000):
        drift = 0.7 + abs(2000 - number) / 2000  # down to 0.7, and up again
        read, expand, compute = (dice.uniform(0.9, 1.1) for _ in range(3))
        meter._rates = BUSY._replace(
            read_s=BUSY.read_s * read, expand_s=BUSY.expand_s * 0.7 * drift * expand
        )
        meter.compute_s = BUSY.compute_s * compute
        raw = meter.stores_raw()
        if raw is not changes[-1]:
            changes.append(raw)
    assert [False, True, False, True] == changes


class ManualTime:
    def __init__(self):
        self.now_s = 0.0

    def perf_counter(self):
        return self.now_s


def test_rates_are_of_all_bytes_and_reads_at_the_same_time_share_their_seconds(monkeypatch):
    clock = ManualTime()
    monkeypatch.setattr(rates, "time", clock)
    monkeypatch.setattr(rates, "MEASURED_BYTES", 400)
    meter = RateMeter(2)
    for _ in range(2):
        with meter.reading(100):
            clock.now_s += 1
            with meter.reading(100):
                clock.now_s += 2
            clock.now_s += 1
        clock.now_s += 50  # nothing is read
    meter.expanded(400, 100, 4.0)
    assert DiskRates(read_s=8 / 400, expand_s=4 / 400, saved=100 / 400) == meter._rates


@pytest.fixture
def tier(tmp_path, monkeypatch):
    monkeypatch.setattr(rates, "MEASURED_BYTES", LAYOUT.nbytes)
    with closing(open_disk(tmp_path, LAYOUT, 8 << 20, check_s=60)) as tier:
        yield tier


def stored(tier, seed):
    """The codecs with which new blocks are written. They are then loaded and compared."""
    frames = take(FrameArena(LAYOUT, COUNT + 1), COUNT + 1)
    ids = chain(COUNT, block_size=LAYOUT.block_size, seed=seed)
    assert not put(tier, ids, frames)
    assert COUNT == fetched(tier, ids, frames).num_blocks
    with tier.view() as view:
        heads = [
            unpack_header(entry.header)
            for entry in view.shards[0].find([block.key for block in ids])
        ]
    return [CodecId(head.codec) for head in heads if isinstance(head, Header)]


def test_a_tier_measures_itself_and_changes_its_mind_both_ways(tier, caplog):
    caplog.set_level("INFO")
    assert {CodecId.PLANES16} == set(stored(tier, 0))
    measured = tier._rates._rates
    assert measured.read_s and measured.expand_s and 0.2 < measured.saved < 0.4
    tier.paced(1.0)  # a token a second: what the room can hold is worth more
    assert {CodecId.PLANES16} == set(stored(tier, 1))
    tier._rates._rates = BUSY
    tier.paced(LAYOUT.block_size / LAYOUT.nbytes / BUSY.compute_s)
    assert {CodecId.RAW} == set(stored(tier, 2))
    assert BUSY.expand_s == tier._rates._rates.expand_s  # what needs no expanding tells nothing
    tier.paced(0.0)
    assert {CodecId.PLANES16} == set(stored(tier, 3))
    said = [line for line in caplog.messages if "new blocks are stored" in line]
    assert ["uncompressed", "compressed"] == [line.split(";")[0].split()[-1] for line in said]


def test_a_budget_of_written_bytes_keeps_records_compressed(tmp_path):
    settings = DiskSettings(write_budget_bytes=1 << 30)
    with closing(open_disk(tmp_path, LAYOUT, 8 << 20, settings=settings, check_s=60)) as tier:
        tier._rates._rates, tier._rates.compute_s = BUSY, BUSY.compute_s
        assert {CodecId.PLANES16} == set(stored(tier, 0))


def test_many_threads_measure_at_once(monkeypatch):
    monkeypatch.setattr(rates, "MEASURED_BYTES", 1000)
    meter = RateMeter(4)

    def read():
        for _ in range(200):
            with meter.reading(10):
                meter.expanded(20, 5, 0.001)
            meter.stores_raw()

    with beside(*[read] * 4):
        pass
    assert 0 == meter._num_reading
    assert 0.25 == meter._rates.saved
    assert meter._rates.expand_s == pytest.approx(0.001 / 20)
