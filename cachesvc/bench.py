"""The document-question scenario: a long document, one question about it, then another.

Measures the time to first token of the second question with the document's blocks on the device, in
host memory, on disk, and on disk after a restart. The same run measures the cold first question.
The engine is driven in process, without HTTP. Used by `cachesvc bench ttft`.
"""

import queue
import random
import statistics
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path

from cachesvc.config.sections import LEAST_BYTES, CacheSection
from cachesvc.config.settings import Settings
from cachesvc.server import compute
from engine.composition import Core
from engine.errors import EngineError
from engine.models.load import LoadedModel
from engine.request import Request, SamplingParams, StepOutput
from engine.text.tokenizer import Tokenizer
from tiers.cache import TieredCache

QUESTION_TOKENS = 12
REPEATS = 5  # questions for each kind of hit
TIMEOUT_S = 300.0


class Case(StrEnum):
    COLD = "cold"
    DEVICE = "device"
    HOST = "host"
    DISK = "disk"
    RESTART = "disk after restart"


@dataclass(frozen=True, slots=True)
class Measured:
    """One case at one size. `ttft_s` is the median over the repeats."""

    case: Case
    prompt_tokens: int
    ttft_s: float
    best_s: float
    worst_s: float
    hit_tokens: int
    computed_tokens: int
    ratio: float = 1.0  # cold time divided by this time


class Probe:
    """Sends one request at a time to an engine and times its first token."""

    def __init__(self) -> None:
        self._outputs: queue.Queue[tuple[StepOutput, int]] = queue.Queue()
        self._number = 0

    def on_outputs(self, outputs: Sequence[StepOutput]) -> None:
        """Engine thread."""
        now_ns = time.perf_counter_ns()
        for output in outputs:
            self._outputs.put((output, now_ns))

    def ask(self, running: Core, tokens: "array[int]") -> tuple[float, StepOutput]:
        """Seconds to the first token, and its output."""
        self._number += 1
        request = Request(
            request_id=f"bench-{self._number}",
            tokens=tokens,
            params=SamplingParams(temperature=0.0, max_tokens=1),
            scope=running.scope,
            arrival_ns=time.monotonic_ns(),
        )
        started_ns = time.perf_counter_ns()
        running.engine.submit(request)
        first: tuple[float, StepOutput] | None = None
        while True:
            output, at_ns = self._outputs.get(timeout=TIMEOUT_S)
            if output.error:
                raise EngineError(f"the engine failed: {output.error}")
            if first is None and output.tokens:
                first = ((at_ns - started_ns) / 1e9, output)
            if output.last:
                break
        if first is None:
            raise EngineError("the engine ended a request without a token")
        return first


class Scenario:
    def __init__(self, loaded: LoadedModel, settings: Settings, folder: Path, largest: int) -> None:
        """Tiers for documents of at most `largest` tokens, with the disk tier in `folder`."""
        self._loaded = loaded
        self._settings = settings
        self._folder = folder
        self._probe = Probe()
        block_size, kv_dtype = settings.cache.block_size or None, settings.model.kv_dtype
        self.layout = loaded.layout(block_size, None if kv_dtype == "auto" else kv_dtype)
        needed = (largest // self.layout.block_size + 8) * self.layout.nbytes
        self._cache = CacheSection(
            block_size=self.layout.block_size,
            device_bytes=max(LEAST_BYTES, 2 * needed),
            host_bytes=max(LEAST_BYTES, 2 * needed),
            disk_bytes=max(1 << 28, 8 * needed),
            weigh_loads=False,
        )

    def run(self, sizes: Sequence[int], report: Callable[[str], None]) -> list[Measured]:
        results: list[Measured] = []
        documents = {size: Document(self._loaded.tokenizer, size, seed=size) for size in sizes}
        with self._running() as running:
            self._warm_up(running)
            for size, document in documents.items():
                report(f"{size} tokens: cold")
                results.append(self._cold(running, document))
                for case in (Case.DEVICE, Case.HOST, Case.DISK):
                    report(f"{size} tokens: {case}")
                    results.append(self._hit(running, document, case))
        for size, document in documents.items():
            report(f"{size} tokens: {Case.RESTART}")
            results.append(self._after_restart(document))
        return with_ratios(results)

    def _cold(self, running: Core, document: "Document") -> Measured:
        ttft_s, output = self._probe.ask(running, document.ask(0))
        return self._measured(Case.COLD, document, [ttft_s], output)

    def _hit(self, running: Core, document: "Document", case: Case) -> Measured:
        times = []
        to_disk = case is Case.DISK
        for repeat in range(REPEATS):
            if case is not Case.DEVICE:
                sunk = running.engine.call(lambda _: sink(running.cache, to_disk=to_disk))
                sunk.result(TIMEOUT_S)
            question = 1 + repeat + 100 * list(Case).index(case)
            ttft_s, output = self._probe.ask(running, document.ask(question))
            times.append(ttft_s)
        return self._measured(case, document, times, output)

    def _after_restart(self, document: "Document") -> Measured:
        times = []
        for repeat in range(REPEATS):
            with self._running() as running:
                self._warm_up(running)
                ttft_s, output = self._probe.ask(running, document.ask(901 + repeat))
                times.append(ttft_s)
        return self._measured(Case.RESTART, document, times, output)

    def _measured(
        self, case: Case, document: "Document", times: Sequence[float], output: StepOutput
    ) -> Measured:
        """Raises EngineError if the document did not come from where the case says."""
        counts, block_size = output.counts, self.layout.block_size
        whole_blocks = document.size // block_size * block_size
        tier = case.partition(" ")[0]  # also after a restart
        served = counts.miss if case is Case.COLD else getattr(counts, f"hit_{tier}")
        if served < whole_blocks - block_size:
            raise EngineError(f"{case}: only {served} of {whole_blocks} tokens came from there")
        return Measured(
            case=case,
            prompt_tokens=document.size,
            ttft_s=statistics.median(times),
            best_s=min(times),
            worst_s=max(times),
            hit_tokens=counts.hit,
            computed_tokens=counts.miss,
        )

    def _warm_up(self, running: Core) -> None:
        document = Document(self._loaded.tokenizer, 4 * self.layout.block_size, seed=-1)
        for question in (0, 1, 2):
            self._probe.ask(running, document.ask(question))

    @contextmanager
    def _running(self) -> Iterator[Core]:
        running = compute.build(
            self._loaded,
            kv_dtype=self._settings.model.kv_dtype,
            cache=self._cache,
            engine=self._settings.engine,
            data_dir=self._folder,
            on_outputs=self._probe.on_outputs,
        )
        running.start(compute.step_tokens(self._settings.engine, self._loaded.device))
        try:
            yield running
        finally:
            running.close()


class Document:
    """A synthetic text of `size` tokens and endless questions about it, fixed by the seed."""

    def __init__(self, tokenizer: Tokenizer, size: int, *, seed: int) -> None:
        self.size = size
        self._tokenizer = tokenizer
        text, random_source = "", random.Random(seed)
        tokens: array[int] = array("i")
        while len(tokens) < size:
            text += "".join(_fact(random_source) for _ in range(64))
            tokens = tokenizer.encode(text)
        self._tokens = tokens[:size]

    def ask(self, number: int) -> "array[int]":
        """The document and question `number`. No two questions begin with the same tokens."""
        question = f"\n{number}. Which badge has person {number * 7919}?"
        return self._tokens + self._tokenizer.encode(question)[:QUESTION_TOKENS]


def _fact(source: random.Random) -> str:
    name = "".join(source.choice("bcdfghjklmnprstvwz") + source.choice("aeiou") for _ in range(3))
    town = source.choice(("Lisbon", "Kyoto", "Oslo", "Quito", "Accra", "Hanoi", "Turin", "Perth"))
    return f"{name.title()} lives in {town} and has badge {source.randrange(10_000)}. "


def sink(cache: TieredCache, *, to_disk: bool) -> None:
    """Demotes every block from the device, and with `to_disk` from the host tier. Engine thread."""
    cache.flush()  # the question is not to wait for processors beside the disk's writer
    residency = cache.residency
    for block in [*cache.index, *cache.index.iter_partials()]:
        if block.slot is not None and block.ref_count == 0:
            residency.evict_device(block)
    for block in [*cache.index, *cache.index.iter_partials()]:
        if to_disk and block.frame is not None and not block.busy:
            residency.evict_host(block)


def with_ratios(results: Sequence[Measured]) -> list[Measured]:
    cold = {each.prompt_tokens: each.ttft_s for each in results if each.case is Case.COLD}
    by_size = sorted(results, key=lambda each: each.prompt_tokens)
    return [replace(each, ratio=cold[each.prompt_tokens] / each.ttft_s) for each in by_size]
