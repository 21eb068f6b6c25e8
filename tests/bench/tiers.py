"""How fast the disk tier is beside what it could be: `python -m tests.bench.tiers`.

One run, one machine, the same blocks for every row: memory, codec alone, raw device, and our tier,
cold and warm, with one and two readers. GB/s are of logical KV (bytes of blocks as attention reads
them); CPU seconds are of the whole process, per logical GB.

The blocks are gaussian with a scale per channel, from a fixed seed; the codec makes 1.45 of them in
bfloat16 and 1.18 in float32, as of real KV of SmolLM2-135M (1.451 and 1.184).

"Cold" drops the file from the page cache of this machine. Where the machine is virtual, its host
may still hold it; the raw device is read under the same condition, so the ratio stands.
"""

import mmap
import os
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
import xxhash

from tests.bench.report import arguments, tell
from tests.support.faulty_storage import chain, take
from tiers.blocks.frames import Frame, FrameArena
from tiers.blocks.keys import BlockId
from tiers.blocks.layout import BlockLayout
from tiers.disk.format.codec import Codec, bound
from tiers.disk.open import open_disk

RUN = 32  # blocks of one prefix, loaded at once


@dataclass(frozen=True)
class Row:
    """One measurement."""

    name: str
    gb_per_s: float
    cpu_s_per_gb: float
    note: str = ""


class Bench:
    """The blocks, the frames they are read into, and the folder everything is written to."""

    def __init__(self, folder: Path, dtype: str, num_blocks: int) -> None:
        self.folder = folder
        self.layout = BlockLayout.uniform(30, 64, 3, 64, dtype)
        self.num_blocks = num_blocks
        self.arena = FrameArena(self.layout, 3 * RUN)
        self.source = take(self.arena, RUN)
        self.frames = [take(self.arena, RUN), take(self.arena, RUN)]
        self.rows: list[Row] = []
        self._fill()
        self.chains = [chain(RUN, block_size=64, seed=seed) for seed in range(num_blocks // RUN)]

    def _fill(self) -> None:
        generator = torch.Generator().manual_seed(0)
        scale = torch.exp(0.7 * torch.randn(30, 2, 1, 3, 64, generator=generator))
        for frame in self.source:
            values = torch.randn(self.layout.shape, generator=generator) * scale
            frame.tensor.copy_(values)
        for frames in self.frames:
            for frame in frames:
                frame.buffer[:] = bytes(len(frame.buffer))

    @property
    def logical_bytes(self) -> int:
        return self.num_blocks * self.layout.nbytes

    def measure(
        self,
        name: str,
        work: Callable[[], object],
        *,
        before: Callable[[], object] | None = None,
        times: int = 3,
        nbytes: int | None = None,
        note: str = "",
    ) -> float:
        """The median of `times` runs of `work` over `nbytes` logical bytes."""
        walls, cpus = [], []
        for _ in range(times):
            if before is not None:
                before()
            cpu, wall = time.process_time(), time.perf_counter()
            work()
            walls.append(time.perf_counter() - wall)
            cpus.append(time.process_time() - cpu)
        size = (nbytes or self.logical_bytes) / 1e9
        rate = size / statistics.median(walls)
        row = Row(name, round(rate, 3), round(statistics.median(cpus) / size, 3), note)
        self.rows.append(row)
        print(f"{row.name:44} {row.gb_per_s:8.2f} GB/s {row.cpu_s_per_gb:8.3f} CPU s/GB  {note}")
        return rate


def in_threads(work: Sequence[Callable[[], object]]) -> None:
    """Run these beside each other and wait."""
    threads = [threading.Thread(target=one) for one in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def drop(path: Path) -> None:
    """Forget a file's pages, or those of every file in a folder; they must be clean."""
    for file in [path] if path.is_file() else [p for p in path.rglob("*") if p.is_file()]:
        fd = os.open(file, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def memory(bench: Bench) -> None:
    """Copying frames, and checking them."""
    target = bench.frames[0]

    def copy() -> None:
        for source, into in zip(bench.source, target, strict=True):
            into.buffer[:] = source.buffer

    def digest() -> None:
        for source in bench.source:
            xxhash.xxh3_64_intdigest(source.buffer)

    nbytes = RUN * bench.layout.nbytes
    bench.measure("memcpy", copy, times=7, nbytes=nbytes)
    bench.measure("xxh3", digest, times=7, nbytes=nbytes)


def codec(bench: Bench) -> float:
    """The codec alone; returns the ratio."""
    item_bytes = bench.layout.torch_dtype.itemsize
    coder = Codec(item_bytes)
    size = bench.layout.nbytes
    coded = []
    for frame in bench.source:
        room = np.empty(bound(size) // 8 + 1, np.uint64).data.cast("B")
        kind, nbytes = coder.encode(frame.buffer, room)
        coded.append((kind, room[:nbytes]))
    room = np.empty(bound(size) // 8 + 1, np.uint64).data.cast("B")

    def encode() -> None:
        for frame in bench.source:
            coder.encode(frame.buffer, room)

    def decode(frames: list[Frame], part: slice = slice(None)) -> None:
        mine = Codec(item_bytes)
        for (kind, payload), frame in zip(coded[part], frames[part], strict=True):
            mine.decode(kind, payload, frame.buffer)

    total = RUN * size
    ratio = total / sum(len(payload) for _, payload in coded)
    note = f"{ratio:.3f}x"
    bench.measure("codec in, 1 thread", encode, times=7, nbytes=total, note=note)
    out = bench.frames[0]
    bench.measure("codec out, 1 thread", lambda: decode(out), times=7, nbytes=total)
    halves = [slice(0, RUN // 2), slice(RUN // 2, RUN)]
    pair = [lambda half=half: decode(out, half) for half in halves]
    bench.measure("codec out, 2 threads", lambda: in_threads(pair), times=7, nbytes=total)
    return ratio


def raw(bench: Bench) -> float:
    """The device under this file system, 4 MiB at a time, past the page cache."""
    path, step = bench.folder / "raw", 4 << 20
    size = bench.logical_bytes // step * step
    room = mmap.mmap(-1, step)
    room.write(np.random.default_rng(0).bytes(step))
    part = memoryview(room)

    def write() -> None:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_DIRECT)
        for at in range(0, size, step):
            os.pwrite(fd, part, at)
        os.fsync(fd)
        os.close(fd)

    def read(flags: int) -> None:
        fd = os.open(path, os.O_RDONLY | flags)
        for at in range(0, size, step):
            os.preadv(fd, [part], at)
        os.close(fd)

    bench.measure("raw write, direct", write, before=lambda: path.unlink(missing_ok=True))
    direct = bench.measure("raw read, direct", lambda: read(os.O_DIRECT), nbytes=size)
    bench.measure("raw read, buffered, cold", lambda: read(0), before=lambda: drop(path))
    path.unlink()
    return direct


def our_tier(bench: Bench, *, raw: bool = False) -> None:
    """The disk tier as it serves, with compressed records or `raw` ones."""
    root = bench.folder / "tier"
    name = "disk tier, uncompressed" if raw else "disk tier"
    tier = None

    def write() -> None:
        nonlocal tier
        tier = open_disk(root, bench.layout, 2 * bench.logical_bytes)
        tier._rates.stores_raw = lambda: raw  # type: ignore[method-assign]
        for ids in bench.chains:
            tier.store(ids, bench.source)
        tier.flush()

    def again() -> None:
        if tier is not None:
            tier.close()
        shutil.rmtree(root, ignore_errors=True)

    def read(chains: Sequence[list[BlockId]], frames: list[Frame]) -> None:
        assert tier is not None
        for ids in chains:
            loaded = tier.load(ids, frames)
            assert loaded.num_blocks == RUN, loaded

    def both() -> None:
        halves = bench.chains[0::2], bench.chains[1::2]
        work = zip(halves, bench.frames, strict=True)
        in_threads([lambda half=half, into=into: read(half, into) for half, into in work])

    def one() -> None:
        read(bench.chains, bench.frames[0])

    bench.measure(f"{name}: write", write, before=again)
    stats = tier.stats() if tier else None
    bench.measure(f"{name}: read warm, 1 reader", one)
    bench.measure(f"{name}: read warm, 2 readers", both)
    bench.measure(f"{name}: read cold, 1 reader", one, before=lambda: drop(root))
    bench.measure(f"{name}: read cold, 2 readers", both, before=lambda: drop(root))
    if tier is not None and stats is not None:
        tier.close()
        opened = time.perf_counter()
        tier = open_disk(root, bench.layout, 2 * bench.logical_bytes)
        print(f"opened {stats.num_blocks} blocks in {time.perf_counter() - opened:.4f} s")
    again()


def estimates(bench: Bench, ratio: float, direct: float) -> dict[str, float]:
    """What each of the tier's rates could be, from the parts measured in the same run."""
    rate = {row.name: row.gb_per_s for row in bench.rows}
    seconds = 1 / rate["codec out, 1 thread"] + (1 / rate["memcpy"] + 1 / rate["xxh3"]) / ratio
    return {
        "disk tier: read warm, 1 reader": 1 / seconds,
        "disk tier: read warm, 2 readers": 2 / seconds,
        "disk tier: read cold, 1 reader": min(direct * ratio, 1 / seconds),
        "disk tier: read cold, 2 readers": min(direct * ratio, 2 / seconds),
        "disk tier: write": 1
        / (1 / rate["codec in, 1 thread"] + 1 / (ratio * rate["raw write, direct"])),
    }


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--blocks", type=int, default=384)
    parser.add_argument("--folder", type=Path, default=None, help="on the file system to measure")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        bench = Bench(Path(folder), options.dtype, options.blocks // RUN * RUN)
        memory(bench)
        ratio = codec(bench)
        direct = raw(bench)
        our_tier(bench)
        our_tier(bench, raw=True)
    could_be = estimates(bench, ratio, direct)
    got = {row.name: row.gb_per_s for row in bench.rows}
    for name, estimate in could_be.items():
        print(f"{name:44} {got[name] / estimate:7.0%} of the {estimate:.2f} GB/s estimated")
    figures = {
        "dtype": options.dtype,
        "logical_bytes": bench.logical_bytes,
        "ratio": round(ratio, 4),
        "rows": [asdict(row) for row in bench.rows],
        "estimates_gb_per_s": {name: round(value, 3) for name, value in could_be.items()},
    }
    tell(figures, options.json)


if __name__ == "__main__":
    main()
