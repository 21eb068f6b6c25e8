"""The document-question scenario: a long document, one question about it, then others.

Measures the time to first token of a later question with the document's blocks on the device, in
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
from pathlib import Path

from cachesvc.config.sections import LEAST_BYTES, CacheSection
from cachesvc.config.settings import Settings
from cachesvc.server import compute
from engine.composition import Core
from engine.errors import EngineError
from engine.models.load import LoadedModel
from engine.request import Request, SamplingParams, StepOutput, TokenCounts
from tiers.cache import TieredCache
from tiers.telemetry.events import EventStream

QUESTION_TOKENS = 12
REPEATS = 5  # questions for each kind of hit
TIMEOUT_S = 300.0
COLD, TIERS, RESTART = "cold", ("device", "host", "disk"), "disk after restart"
CASES = (COLD, *TIERS, RESTART)

Answer = tuple[float, TokenCounts]  # seconds to the first token, and what its prompt hit


@dataclass(frozen=True, slots=True)
class Measured:
    """One case at one size. `ttft_s` is the median over the repeats."""

    case: str
    prompt_tokens: int
    ttft_s: float
    best_s: float
    worst_s: float
    hit_tokens: int
    computed_tokens: int
    ratio: float = 1.0  # cold time divided by this time


class Scenario:
    """Documents and questions of random tokens: only their number decides how long they take."""

    def __init__(self, loaded: LoadedModel, settings: Settings, folder: Path, largest: int) -> None:
        """Tiers for documents of at most `largest` tokens, with the disk tier in `folder`."""
        self._loaded = loaded
        self._outputs: queue.Queue[tuple[StepOutput, float]] = queue.Queue()
        self._random, self._number = random.Random(1), 0
        self.layout = compute.layout_of(loaded, settings)
        needed = (largest // self.layout.block_size + 8) * self.layout.nbytes
        cache = CacheSection(
            block_size=self.layout.block_size,
            device_bytes=max(LEAST_BYTES, 2 * needed),
            host_bytes=max(LEAST_BYTES, 2 * needed),
            disk_bytes=max(1 << 28, 8 * needed),
            weigh_loads=False,
        )
        server = settings.server.model_copy(update={"data_dir": folder})
        self._settings = settings.model_copy(update={"cache": cache, "server": server})

    def run(self, sizes: Sequence[int], done: Callable[[int], None]) -> list[Measured]:
        """Every case at every size, the smallest first; `done` is told after each."""
        found: list[Measured] = []

        def note(case: str, size: int, answers: Sequence[Answer]) -> None:
            found.append(self._measured(case, size, answers))
            done(1)

        documents = {size: self._tokens(size) for size in sizes}
        with self._running() as core:
            for size, document in documents.items():
                note(COLD, size, [self._ask(core, document)])
                for tier in TIERS:
                    note(tier, size, [self._hit(core, document, tier) for _ in range(REPEATS)])
        for size, document in documents.items():
            note(RESTART, size, [self._after_restart(document) for _ in range(REPEATS)])
        cold = {each.prompt_tokens: each.ttft_s for each in found if each.case == COLD}
        by_size = sorted(found, key=lambda each: each.prompt_tokens)
        return [replace(each, ratio=cold[each.prompt_tokens] / each.ttft_s) for each in by_size]

    def _hit(self, core: Core, document: "array[int]", tier: str) -> Answer:
        if tier != "device":
            core.engine.call(lambda _: sink(core.cache, to_disk=tier == "disk")).result(TIMEOUT_S)
        return self._ask(core, document)

    def _after_restart(self, document: "array[int]") -> Answer:
        with self._running() as core:
            return self._ask(core, document)

    def _ask(self, core: Core, document: "array[int]") -> Answer:
        """Asks a question about a document, as the only request."""
        self._number += 1
        request = Request(
            request_id=f"bench-{self._number}",
            tokens=document + self._tokens(QUESTION_TOKENS),
            params=SamplingParams(temperature=0.0, max_tokens=1),
            scope=core.scope,
            arrival_ns=time.monotonic_ns(),
        )
        began_s = time.perf_counter()
        core.engine.submit(request)
        answer: Answer | None = None
        while True:
            output, at_s = self._outputs.get(timeout=TIMEOUT_S)
            if output.error:
                raise EngineError(f"the engine failed: {output.error}")
            if answer is None and output.tokens:
                answer = at_s - began_s, output.counts
            if output.last:
                break
        if answer is None:
            raise EngineError("the engine ended a request without a token")
        return answer

    def _measured(self, case: str, size: int, answers: Sequence[Answer]) -> Measured:
        """Raises EngineError if the document did not come from where the case says."""
        times, counts = [seconds for seconds, _ in answers], answers[-1][1]
        block_size = self.layout.block_size
        whole_blocks = size // block_size * block_size
        tier = case.partition(" ")[0]  # also after a restart
        served = counts.miss if case == COLD else getattr(counts, f"hit_{tier}")
        if served < whole_blocks - block_size:
            raise EngineError(f"{case}: only {served} of {whole_blocks} tokens came from there")
        middle, best, worst = statistics.median(times), min(times), max(times)
        return Measured(case, size, middle, best, worst, counts.hit, counts.miss)

    def _tokens(self, count: int) -> "array[int]":
        return array("i", self._random.choices(range(self._loaded.vocab_size), k=count))

    @contextmanager
    def _running(self) -> Iterator[Core]:
        """An engine over the folder that has answered some questions."""
        core = compute.build(self._loaded, self._settings, self._take, EventStream())
        core.start(compute.step_tokens(self._settings.engine, self._loaded.device))
        try:
            document = self._tokens(4 * self.layout.block_size)
            for _ in range(3):
                self._ask(core, document)
            yield core
        finally:
            core.close()

    def _take(self, outputs: Sequence[StepOutput]) -> None:
        """Engine thread."""
        for output in outputs:
            self._outputs.put((output, time.perf_counter()))


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
