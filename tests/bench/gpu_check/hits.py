"""Hits from every tier against the prompt computed cold, through the whole engine.

A block comes back with the bits that it left with, and a hit from any tier computes the same tail.
So tokens and log-probabilities are equal from the device, the host and the disk, on any device.
Cold computes more rows at once, which rounds otherwise: its first log-probability may differ by
rounding, and its tokens where two are nearly equally likely.
"""

import tempfile
import threading
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine.engine import Engine
from engine.errors import ModelError
from engine.execution.runner import ModelRunner
from engine.models.load import LoadedModel, load_adapter
from engine.request import Request, SamplingParams, StepOutput
from engine.scheduling.settings import SchedulerSettings
from engine.settings import EngineSettings
from tests.bench.gpu_check.parity import moved
from tests.parity.architectures import served
from tests.support.models import save_tiny_adapter, tiny_model
from tiers.blocks.keys import CacheScope
from tiers.cache import CacheSettings, TieredCache

BLOCK = 16
MOST_ROUNDED = {"float32": 1e-3, "bfloat16": 0.1}  # of a log-probability, cold against hit
GIVE_UP_S = 120.0
ASKED = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=1)


@dataclass(frozen=True)
class Case:
    """A model, and what a request for it names besides tokens."""

    loaded: LoadedModel
    tokens: Sequence[int]
    asked: dict[str, Any] = field(default_factory=dict)


def check(device: str, small: bool) -> dict[str, Any]:
    cases: dict[str, Callable[[str, Path], Case]] = {
        "bfloat16": lambda device, _: _plain(moved(tiny_model(dtype="bfloat16"), device)),
        "states": lambda device, _: _plain(moved(served("lfm2"), device)),
        "recurrent": lambda device, _: _plain(moved(served("qwen3_next"), device)),
        "lora": _lora,
        "grammar": _grammar,
    }
    figures: dict[str, Any] = {}
    for name, case in cases.items():
        with tempfile.TemporaryDirectory() as folder:
            try:
                figures[name] = _of(name, case(device, Path(folder)), device, Path(folder))
            except ModuleNotFoundError as error:  # a bare machine
                figures[name] = {"skipped": f"{error.name} is not installed"}
            except ModelError as error:  # the other cases' figures are wanted too
                figures[name] = {"what": f"{name}: {error}", "ok": False}
    return figures


class House:
    """One engine over its tiers, with a disk in a folder."""

    def __init__(self, loaded: LoadedModel, device: str, folder: Path) -> None:
        from tiers.disk.open import open_disk

        layout = loaded.layout(BLOCK)
        self._loaded = loaded
        states = (
            open_disk(folder / "states", layout.checkpoint, 64 << 20) if layout.states else None
        )
        num_bytes = 64 * (layout.nbytes + (layout.checkpoint.nbytes if layout.states else 0))
        share = 1 - 64 * layout.nbytes / num_bytes
        settings = CacheSettings(
            device_bytes=num_bytes,
            host_bytes=num_bytes,
            weigh_loads=False,
            share_tails=False,
            **({"checkpoint_share": share} if layout.states else {}),
        )
        disk = open_disk(folder / "disk", layout, 64 << 20)
        self.cache = TieredCache(layout, settings, device=device, disk=disk, checkpoint_disk=states)
        pool = self.cache.checkpoint_pool
        runner = ModelRunner(
            loaded,
            self.cache.pool.tensor,
            scratch=self.cache.pool.scratch,
            owners=self.cache.pool.owners,
            checkpoints=pool.tensor if pool is not None else None,
        )
        self._outputs: list[StepOutput] = []
        self._ended = threading.Event()
        self.engine = Engine(
            runner,
            self.cache,
            EngineSettings(
                scheduler=SchedulerSettings(),
                max_context=1024,
                adapters=loaded.adapters.digests,
                eos_token_ids=loaded.eos_token_ids,
                jump_forward=False,
            ),
            self._take,
        )
        self.engine.start(runner.warm_up)

    def ask(self, case: Case, *, cache: bool = True) -> dict[str, Any]:
        """Its tokens, their log-probabilities, and its hits by tier."""
        self._outputs.clear()
        self._ended.clear()
        adapter = case.asked.get("adapter")
        digest = self._loaded.adapters.digests[adapter] if adapter else b""
        scope = CacheScope(layout=self.cache.layout.digest(), adapter=digest)
        request = Request(
            request_id="one",
            tokens=array("i", case.tokens),
            params=ASKED,
            scope=scope,
            cache=cache,
            **case.asked,
        )
        self.engine.submit(request)
        if not self._ended.wait(GIVE_UP_S):
            raise TimeoutError("no answer")
        outputs = list(self._outputs)
        counts = outputs[-1].counts
        return {
            "tokens": [token for output in outputs for token in output.tokens],
            "logprobs": [one.logprob for output in outputs for one in output.logprobs or ()],
            "hits": [counts.hit_device, counts.hit_host, counts.hit_disk],
        }

    def sink(self, *, to_disk: bool) -> None:
        """Push every block off the device, and with `to_disk` out of the host as well."""

        def down() -> None:
            if to_disk:
                self.cache.flush()
            for cache in (self.cache, self.cache.group) if self.cache.group else (self.cache,):
                for block in list(cache.index):
                    if block.slot is not None:
                        cache.residency.evict_device(block)
                for block in list(cache.index):
                    if to_disk and block.frame is not None and not block.busy:
                        cache.residency.evict_host(block)

        self.engine.call(lambda _: down()).result(GIVE_UP_S)

    def close(self) -> None:
        self.engine.close()
        self.cache.close()

    def _take(self, outputs: Sequence[StepOutput]) -> None:
        self._outputs += outputs
        if any(output.last for output in outputs):
            self._ended.set()


def _of(name: str, case: Case, device: str, folder: Path) -> dict[str, Any]:
    house = House(case.loaded, device, folder)
    try:
        cold = house.ask(case, cache=False)
        house.ask(case)
        found = {"device": house.ask(case)}
        house.sink(to_disk=False)
        found["host"] = house.ask(case)
        house.sink(to_disk=True)
        found["disk"] = house.ask(case)
    finally:
        house.close()
    hits = [answer["hits"] for answer in found.values()]
    served_from = all(hit[place] == sum(hit) > 0 for place, hit in enumerate(hits))
    first = found["device"]
    equal = all((a["tokens"], a["logprobs"]) == (first["tokens"], first["logprobs"])
                for a in found.values())  # fmt: skip
    rounded = abs(cold["logprobs"][0] - first["logprobs"][0])
    return {
        "what": f"{name}: hits from every tier, with the same bits",
        "ok": served_from and equal and rounded <= MOST_ROUNDED[case.loaded.dtype],
        "hits": dict(zip(found, hits, strict=True)),
        "tiers_equal": equal,
        "cold_logprob_differs": rounded,
        "cold_tokens_equal": cold["tokens"] == first["tokens"],
    }


def _plain(loaded: LoadedModel, **asked: Any) -> Case:
    """Its answer ends within the prompt's last block: where that block is full, a hit reads the KV
    that the cold request computed for it, and a hit after eviction its own."""
    return Case(loaded, [(7 * i * i + 3) % loaded.vocab_size for i in range(70)], asked)


def _lora(device: str, folder: Path) -> Case:
    save_tiny_adapter(folder / "adapter")
    loaded = moved(tiny_model(), device)
    load_adapter(loaded, "lora", str(folder / "adapter"))
    return _plain(loaded, adapter="lora")


def _grammar(device: str, folder: Path) -> Case:
    from engine.grammar.compiler import compiler_for
    from engine.structure import StructuredOutputs, source_of

    loaded = moved(tiny_model(), device)
    source = source_of(StructuredOutputs(regex="[a-z]{20,30}"))
    return _plain(loaded, grammar=compiler_for(loaded).compile(source))
