"""What jumping over forced tokens saves: one schema with long keys, with and without, in one run.

    python -m tests.bench.jump_forward --cache-dir DIR [--json FILE]

Estimate: of an answer of F forced and C chosen tokens, stepping computes F + C single tokens, and
jumping C spans of 1 + F / C tokens. A decode step of the default model on two cores takes 25 ms and
one of ten tokens 35 to 40 (docs/measurements), so with F = 3 C time should fall to about
(35 C) / (25 * 4 C) = 0.35.
"""

import argparse
import json
import statistics
import time
from array import array
from pathlib import Path
from typing import Any

from engine.engine import Engine
from engine.execution.runner import ModelRunner
from engine.grammar.compiler import compiler_for
from engine.models.files import DEFAULT_MODEL
from engine.models.load import LoadedModel, load_model
from engine.request import Request, SamplingParams, StepOutput
from engine.settings import EngineSettings
from engine.structure import Grammar, StructuredOutputs, source_of
from tests.bench.provenance import commit, machine
from tiers.blocks.keys import CacheScope
from tiers.cache import CacheSettings, TieredCache

BLOCK, BLOCKS, RUNS = 64, 40, 3
LEVEL = {"enum": ["low", "medium", "high"]}
SCHEMA = {
    "type": "object",
    "properties": {
        "preferred_contact_telephone_number": {"type": "string", "pattern": "[0-9]{3}-[0-9]{4}"},
        "emergency_contact_relationship": {"enum": ["parent", "partner", "friend"]},
        "is_currently_employed_full_time": {"type": "boolean"},
        "number_of_dependent_children": {"type": "integer", "minimum": 0, "maximum": 9},
        "confidence_in_this_extraction": LEVEL,
        "risk_assessment_of_the_applicant": LEVEL,
    },
}
SCHEMA["required"] = list(SCHEMA["properties"])  # type: ignore[call-overload]
MESSAGES = [{"role": "user", "content": "Anna Berg, two children, 555-0142, ask her husband."}]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cache-dir", type=Path, required=True, help="where models are prepared")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    loaded = load_model(DEFAULT_MODEL, device="cpu", dtype="float32", cache_dir=options.cache_dir)
    compiler = compiler_for(loaded)
    try:
        grammar = compiler.compile(source_of(StructuredOutputs(json=SCHEMA)))
    finally:
        compiler.close()
    sides = [Side(loaded, grammar, jump=jump) for jump in (False, True)]
    for _ in range(RUNS + 1):  # the first one fills the cache and is not counted
        for side in sides:
            side.run()
    stepping, jumping = sides
    assert stepping.tokens == jumping.tokens, "jumping changed the answer"
    figures = {
        "machine": machine(),
        "commit": commit(),
        "output_tokens": len(stepping.tokens),
        "forced_tokens": jumping.jumped_tokens,
        "stepping": stepping.figures(),
        "jumping": jumping.figures(),
        "steps_ratio": round(jumping.steps / stepping.steps, 3),
        "time_ratio": round(jumping.decode_ms / stepping.decode_ms, 3),
        "cpu_ratio": round(jumping.cpu_ms / stepping.cpu_ms, 3),
    }
    print(json.dumps(figures, indent=1))
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1) + "\n")


class Side:
    """One engine, and the medians of its runs: from the first output to the last."""

    def __init__(self, loaded: LoadedModel, grammar: Grammar, *, jump: bool) -> None:
        layout = loaded.layout(BLOCK)
        settings = CacheSettings(device_bytes=BLOCKS * layout.nbytes, host_bytes=0)
        cache = TieredCache(layout, settings)
        runner = ModelRunner(loaded, cache.pool.tensor, owners=cache.pool.owners)
        runner.warm_up()
        self._outputs: list[StepOutput] = []
        self._engine = Engine(
            runner,
            cache,
            EngineSettings(eos_token_ids=loaded.eos_token_ids, jump_forward=jump),
            self._outputs.extend,
        )
        self._prompt = loaded.tokenizer.chat(MESSAGES)
        self._grammar = grammar
        self._times: list[tuple[float, float]] = []
        self.steps = self.jumped_tokens = 0

    def run(self) -> None:
        self._outputs.clear()
        before = self._engine.stats()
        self._engine.submit(request(str(len(self._times)), self._prompt, self._grammar))
        while not self._outputs:
            self._engine.turn()
        wall, cpu = time.perf_counter(), time.process_time()
        while not self._outputs[-1].last:
            self._engine.turn()
        self._times.append((time.perf_counter() - wall, time.process_time() - cpu))
        after = self._engine.stats()
        self.steps = after.num_steps - before.num_steps
        self.jumped_tokens = after.jumped_tokens - before.jumped_tokens

    @property
    def tokens(self) -> list[int]:
        return [token for output in self._outputs for token in output.tokens]

    @property
    def decode_ms(self) -> float:
        return round(statistics.median(wall for wall, _ in self._times[1:]) * 1e3, 1)

    @property
    def cpu_ms(self) -> float:
        return round(statistics.median(cpu for _, cpu in self._times[1:]) * 1e3, 1)

    def figures(self) -> dict[str, Any]:
        return {"steps": self.steps, "decode_ms": self.decode_ms, "cpu_ms": self.cpu_ms}


def request(name: str, prompt: "array[int]", grammar: Grammar) -> Request:
    params = SamplingParams(temperature=0, max_tokens=400)
    return Request(
        request_id=name, tokens=prompt, params=params, scope=CacheScope(), grammar=grammar
    )


if __name__ == "__main__":
    main()
