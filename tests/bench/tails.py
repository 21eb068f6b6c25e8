"""What reusing partly filled blocks gains and costs, on and off.

    python -m tests.bench.tails --cache-dir DIR [--json FILE] [--no-model]

Bookkeeping alone, a request at a time, a runner that computes nothing: prompts whose last block is
new each time (0 % hits, though as many candidates are looked through as are kept), and one prompt
again and again (100 %).
Then the default model: time to first token of the same, and of the next turn of a chat.

Estimate: looking through 40 candidates takes 0.3 us each, so some 12 us a request; a tail is half a
block, 32 tokens, on average, and 32 tokens are computed in about 40 ms where one takes 25.
"""

import argparse
import json
import statistics
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from engine.engine import Engine, Runner
from engine.execution.runner import Runner as ModelRunner
from engine.models.files import DEFAULT_MODEL
from engine.models.load import load_model
from engine.request import Request, SamplingParams, StepOutput
from engine.settings import EngineSettings
from tests.bench.lookup import Idle
from tests.bench.provenance import commit
from tiers.blocks.keys import CacheScope
from tiers.blocks.layout import BlockLayout
from tiers.cache import CacheSettings, TieredCache

BLOCK, HEAD, TAIL = 64, 512, 48  # a prompt is HEAD tokens of whole blocks and TAIL more
LAYOUT = BlockLayout.uniform(
    num_layers=1, block_size=BLOCK, num_kv_heads=1, head_dim=1, dtype="float16"
)


class Served:
    """An engine without a thread: a request at a time, timed to its first token."""

    def __init__(
        self, layout: BlockLayout, make: Callable[[TieredCache], Runner], *, share: bool
    ) -> None:
        settings = CacheSettings(device_bytes=600 * layout.nbytes, host_bytes=0, share_tails=share)
        self.cache = TieredCache(layout, settings)
        self.engine = Engine(make(self.cache), self.cache, EngineSettings(), self._take)
        self.first_ns = 0
        self.tokens: list[int] = []
        self.number = 0
        self.computed = 0  # prompt tokens, for the last request

    def ask(self, prompt: Sequence[int], num_tokens: int = 1) -> float:
        """Microseconds from submission to the first token."""
        self.first_ns, self.tokens = 0, []
        self.number += 1
        request = Request(
            request_id=str(self.number),
            tokens=array("i", prompt),
            params=SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True),
            scope=CacheScope(),
        )
        before = self.engine.stats().prompt_tokens_computed
        began = time.perf_counter_ns()
        self.engine.submit(request)
        while self.engine.turn():
            pass
        self.computed = self.engine.stats().prompt_tokens_computed - before
        return (self.first_ns - began) / 1e3

    def _take(self, outputs: Sequence[StepOutput]) -> None:
        self.first_ns = self.first_ns or time.perf_counter_ns()
        self.tokens += [token for output in outputs for token in output.tokens]


def head() -> list[int]:
    return [(7 * i) % 40_000 + 100 for i in range(HEAD)]


def tail(number: int) -> list[int]:
    return [(31 * number + 17 * i) % 40_000 + 100 for i in range(TAIL)]


def new_tails(served: Served, rounds: int) -> Iterator[float]:
    served.ask(head())
    for number in range(min(rounds, 100)):
        served.ask(head() + tail(number))
    for number in range(1000, 1000 + rounds):
        yield served.ask(head() + tail(number))


def same_prompt(served: Served, rounds: int) -> Iterator[float]:
    served.ask(head() + tail(0))
    for _ in range(rounds):
        yield served.ask(head() + tail(0))


def next_turns(served: Served, rounds: int) -> Iterator[float]:
    """Each turn is the last one, its answer, and 10 tokens more."""
    prompt = head()
    for number in range(rounds):
        prompt += tail(number)[:10]
        yield served.ask(prompt, num_tokens=8)
        prompt += served.tokens


CASES = {"0 % hits": new_tails, "100 % hits": same_prompt, "next turn": next_turns}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cache-dir", type=Path)
    parser.add_argument("--no-model", action="store_true")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    figures: dict[str, Any] = {"commit": commit()}
    figures["bookkeeping"] = _figures(LAYOUT, lambda _: Idle(), rounds=500)
    if not options.no_model:
        if options.cache_dir is None:
            parser.error("the model needs --cache-dir")
        loaded = load_model(
            DEFAULT_MODEL, device="cpu", dtype="float32", cache_dir=options.cache_dir
        )
        figures["model"] = _figures(
            loaded.layout(BLOCK),
            lambda cache: ModelRunner(loaded, cache.pool.tensor, owners=cache.pool.owners),
            rounds=6,
        )
    print(json.dumps(figures, indent=1))
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1) + "\n")


def _figures(
    layout: BlockLayout, make: Callable[[TieredCache], Runner], *, rounds: int
) -> dict[str, Any]:
    """Per case, off and on: the median time to first token, and prompt tokens computed for it."""
    figures: dict[str, Any] = {}
    for name, case in CASES.items():
        for word, share in (("off", False), ("on", True)):
            served = Served(layout, make, share=share)
            times = list(case(served, rounds))
            figures.setdefault(name, {})[word] = {
                "ttft_us": round(statistics.median(times), 1),
                "tokens_computed": served.computed,
            }
    return figures


if __name__ == "__main__":
    main()
