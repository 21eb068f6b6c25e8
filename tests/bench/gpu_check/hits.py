"""Hits from every tier against the prompt computed cold, through the whole engine.

A block comes back with the bits that it left with, and a hit from any tier computes the same tail.
So tokens and log-probabilities are equal from the device, the host and the disk, on any device.
Cold computes more rows at once, which rounds otherwise: its first log-probability may differ by
rounding, and its tokens where two are nearly equally likely.
"""

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine.errors import ModelError
from engine.models.load import LoadedModel, load_adapter
from tests.bench.gpu_check.parity import moved
from tests.parity.architectures import served
from tests.support.models import save_tiny_adapter, tiny_model

MOST_ROUNDED = {"float32": 1e-3, "bfloat16": 0.1}  # of a log-probability, cold against hit
ANSWERED_FROM = ("device", "host", "disk", "disk after a restart")


@dataclass(frozen=True)
class Case:
    """A model, and what a request for it names besides tokens."""

    loaded: LoadedModel
    asked: dict[str, Any] = field(default_factory=dict)


def check(device: str, small: bool) -> dict[str, Any]:
    cases: dict[str, Callable[[str, Path], Case]] = {
        "bfloat16": lambda device, _: Case(moved(tiny_model(dtype="bfloat16"), device)),
        "states": lambda device, _: Case(moved(served("lfm2"), device)),
        "recurrent": lambda device, _: Case(moved(served("qwen3_next"), device)),
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


def _of(name: str, case: Case, device: str, folder: Path) -> dict[str, Any]:
    """Its answer ends within the prompt's last block: where that block is full, a hit reads the KV
    that the cold request computed for it, and a hit after eviction its own."""
    from tests.support.house import House, from_every_tier

    tokens = [(7 * i * i + 3) % case.loaded.vocab_size for i in range(70)]
    logprobs: list[list[float]] = []
    compiled: list[int] = []  # after each start, and after each answer

    def build() -> House:
        house = House(case.loaded, folder / "disk", share_tails=False, device=device)
        compiled.append(_num_compiled())
        return house

    def ask(house: House, **asked: Any) -> Any:
        told = house.ask([tokens], logprobs=1, **case.asked, **asked)
        logprobs.append([one.logprob for output in house.told for one in output.logprobs])
        compiled.append(_num_compiled())
        return told

    answers, hits = from_every_tier(build, ask)
    found = list(zip(answers, logprobs, strict=True))
    rounded = abs(logprobs[0][0] - logprobs[2][0])
    equal = found[3:] == [found[2]] * 3
    served_from = len({*hits[2:]}) == 1 and hits[2] > 0
    in_service = max(compiled[1:6]) - compiled[0] + compiled[7] - compiled[6]
    return {
        "what": f"{name}: hits from every tier, with the same bits, and nothing compiled for them",
        "ok": served_from
        and equal
        and rounded <= MOST_ROUNDED[case.loaded.dtype]
        and in_service == 0,
        "compiled_in_service": in_service,
        "hits": dict(zip(ANSWERED_FROM, hits[2:], strict=True)),
        "tiers_equal": equal,
        "cold_logprob_differs": rounded,
        "cold_tokens_equal": answers[0] == answers[2],
    }


def _lora(device: str, folder: Path) -> Case:
    save_tiny_adapter(folder / "adapter")
    loaded = moved(tiny_model(), device)
    load_adapter(loaded, "lora", str(folder / "adapter"))
    return Case(loaded, {"adapters": ["lora"]})


def _grammar(device: str, folder: Path) -> Case:
    from engine.grammar.compiler import compiler_for
    from engine.structure import StructuredOutputs, source_of

    loaded = moved(tiny_model(), device)
    source = source_of(StructuredOutputs(regex="[a-z]{20,30}"))
    return Case(loaded, {"grammar": compiler_for(loaded).compile(source)})


def _num_compiled() -> int:
    """Forms of the kernels that stand compiled; 0 where there are none."""
    try:
        from engine.attention.kernels import _paged_kernel
    except ImportError:
        return 0
    caches: dict[Any, Any] = getattr(_paged_kernel, "device_caches", {})
    return sum(len(cache[0]) for cache in caches.values())
