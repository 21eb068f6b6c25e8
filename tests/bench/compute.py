"""The compute half alone: prefill, hits and decode on the default model, against transformers.

    python -m tests.bench.compute --cache-dir DIR [--only ours|batch|adapter]

Run it on a quiet machine: a busy core makes torch's threads wait for each other. Every figure is
the best of a few runs in one process, in milliseconds unless it says otherwise. docs/measurements
holds the estimates beside results.
"""

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from engine.batch import Batch, Span
from engine.execution.runner import ModelRunner
from engine.models.files import DEFAULT_MODEL
from engine.models.gguf import converted_folder
from engine.models.load import LoadedModel, load_adapter, load_model
from engine.request import SamplingParams
from tests.bench.gpu_check.speed import generate_batch, serve
from tests.bench.report import arguments, tell
from tests.support.models import save_adapter

LENGTHS = (1024, 2048, 4096)
BLOCK, CHUNK, NEW = 64, 512, 10
BATCH, STEPS = 8, 32
GREEDY = SamplingParams(temperature=0)


def best_ms(work: Callable[[], object], times: int) -> float:
    found = []
    for _ in range(times):
        begin = time.perf_counter()
        work()
        found.append(time.perf_counter() - begin)
    return round(min(found) * 1e3, 1)


class Bench:
    """One prompt, its KV in one pool; sequences come and go under new ids."""

    def __init__(self, runner: ModelRunner, num_blocks: int) -> None:
        self.runner = runner
        self.table = list(range(num_blocks))
        self.tokens = np.random.default_rng(0).integers(100, 40_000, 8192, dtype=np.int32)
        self.sequence_id = 0
        self.adapter: str | None = None

    def new(self) -> None:
        self.runner.forget(self.sequence_id)
        self.sequence_id += 1

    def step(self, start: int, end: int, *, sample: bool = True, write_kv: bool = True) -> None:
        span = Span(
            self.sequence_id,
            self.tokens[start:end],
            start,
            self.table,
            sample,
            GREEDY,
            num_prompt_tokens=end,
            write_kv=write_kv,
            adapter=self.adapter,
        )
        self.runner.step(Batch([span]))

    def cold(self, length: int) -> None:
        self.new()
        for start in range(0, length, CHUNK):
            self.step(start, min(length, start + CHUNK), sample=start + CHUNK >= length)

    def hit(self, length: int) -> None:
        self.new()
        self.step(length, length + NEW)

    def whole(self, length: int) -> None:
        self.new()
        self.step(length - 1, length, write_kv=False)

    def decode(self, length: int) -> float:
        self.hit(length)
        positions = iter(range(length + NEW, length + NEW + 20))

        def one() -> None:
            position = next(positions)
            self.step(position, position + 1)

        return best_ms(one, 20)

    def batch_decode(self, length: int, num_sequences: int) -> float:
        """Milliseconds of a step that decodes one token for each of several sequences."""
        spans = [
            Span(10_000 + n, self.tokens[n : n + 1], length, self.table, True, GREEDY)
            for n in range(num_sequences)
        ]
        self.runner.step(Batch(spans))
        return best_ms(lambda: self.runner.step(Batch(spans)), 5)


def bandwidth_gb_s() -> float:
    """Reading weights as a GEMM with two rows does; 0.5 GB, far beyond any cache."""
    if not hasattr(torch.ops.mkldnn, "_reorder_linear_weight"):
        return 0.0
    packed = [
        torch.ops.mkldnn._reorder_linear_weight(torch.randn(12_288, 576), 512) for _ in range(18)
    ]
    rows = torch.randn(2, 576)

    def read() -> None:
        for weight in packed:
            torch.ops.mkldnn._linear_pointwise(rows, weight, None, "none", [], "")

    return round(18 * 12_288 * 576 * 4 / best_ms(read, 5) / 1e6, 1)


def transformers_figures(folder: Path, tokens: np.ndarray) -> dict[str, Any]:
    """Its own forward with SDPA, whole prompt, last logits only; then decode on its cache."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    figures = {}
    for length in LENGTHS:
        ids = torch.from_numpy(tokens[:length].astype(np.int64))[None]
        kept: dict[str, Any] = {}

        def prefill(ids: torch.Tensor = ids, kept: dict[str, Any] = kept) -> None:
            kept["cache"] = model(ids, use_cache=True, logits_to_keep=1).past_key_values

        cold = best_ms(prefill, 2)
        one = ids[:, :1]
        decode = best_ms(lambda one=one, kept=kept: model(one, past_key_values=kept["cache"]), 10)
        figures[str(length)] = {"cold": cold, "decode": decode}
    return figures


def lengths(bench: Bench) -> dict[str, Any]:
    """One sequence at a time, by the length of its prompt."""
    return {
        "weights_read_gb_s": bandwidth_gb_s(),
        "ours": {
            str(length): {
                "cold": best_ms(lambda length=length: bench.cold(length), 2),
                f"hit_{NEW}_new": best_ms(lambda length=length: bench.hit(length), 5),
                "hit_whole": best_ms(lambda length=length: bench.whole(length), 5),
                "decode": bench.decode(length),
            }
            for length in LENGTHS
        },
        "decode_step_of_8_at_512": bench.batch_decode(512, 8),
    }


def together(runner: ModelRunner, model: Any) -> dict[str, Any]:
    """Eight prompts prefilled and decoded, beside transformers' `generate` and `generate_batch`.

    Tokens per second are of prompts and answers together. `generate` serves them as one batch.
    """
    tokens = np.random.default_rng(1).integers(100, 40_000, (BATCH, 512), dtype=np.int32)
    prompts = list(tokens)
    per_prompt = -(-(512 + STEPS) // BLOCK)
    tables = [list(range(n * per_prompt, (n + 1) * per_prompt)) for n in range(BATCH)]
    ours = serve(runner, prompts, tables, STEPS, "cpu")
    total = BATCH * (512 + STEPS)
    ids = torch.from_numpy(tokens.astype(np.int64))
    settings = GenerationConfig(max_new_tokens=STEPS, min_new_tokens=STEPS, do_sample=False)
    began = time.perf_counter()
    with torch.inference_mode():
        model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=settings)
    generate_s = time.perf_counter() - began
    return {
        "ours": {**ours, "tokens_per_s": total / ours["seconds"]},
        "generate": {"seconds": generate_s, "tokens_per_s": total / generate_s},
        "generate_batch": generate_batch(model, prompts, STEPS),
    }


def adapted(bench: Bench, loaded: LoadedModel, model: Any) -> dict[str, Any]:
    """A prompt of 1,024 tokens and a decoded token: without an adapter, and with one.

    Rank 16 on all linear layers. Estimate: 2 r (in + out) a layer beside 2 in out of the matrix is
    9 % of the multiplications for 576 x 576 and 4 % for 576 x 1,536; a decode step is bound by
    reading weights, and reads as much more, but for seven small calls in each of 30 layers.
    """
    with tempfile.TemporaryDirectory() as folder:
        config = {"r": 16, "lora_alpha": 16, "target_modules": "all-linear"}
        save_adapter(Path(folder), model, **config)
        load_adapter(loaded, "adapted", folder)
    figures = {}
    for name in (None, "adapted"):
        bench.adapter = name
        figures[name or "base"] = {
            "cold": best_ms(lambda: bench.cold(1024), 3),
            "decode": bench.decode(1024),
        }
    bench.adapter = None
    base, own = figures["base"], figures["adapted"]
    return figures | {"ratio": {what: round(own[what] / base[what], 2) for what in base}}


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--cache-dir", type=Path, required=True)
    parser.add_argument("--kv-dtype", default="bfloat16")
    parser.add_argument(
        "--only",
        choices=("ours", "batch", "adapter"),
        help="one sequence without the peer; eight at once; with an adapter and without",
    )
    given = parser.parse_args()
    loaded = load_model(DEFAULT_MODEL, device="cpu", dtype="float32", cache_dir=given.cache_dir)
    layout = loaded.layout(BLOCK, given.kv_dtype)
    pool = torch.zeros((96, *layout.shape), dtype=layout.torch_dtype)
    runner = ModelRunner(loaded, pool)
    runner.warm_up()
    for lazy in runner.lazy_memories:
        lazy.touch(lazy.limit)
    bench = Bench(runner, 96)
    result: dict[str, Any] = {
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "kv_dtype": given.kv_dtype,
    }
    (folder,) = given.cache_dir.glob(converted_folder(Path(), b"").name + "?*")
    if given.only in (None, "ours"):
        result |= lengths(bench)
        if given.only != "ours":
            with torch.inference_mode():
                result["transformers"] = transformers_figures(folder, bench.tokens)
    if given.only in (None, "batch"):
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        result["eight_prompts_of_512"] = together(runner, model)
    if given.only in (None, "adapter"):
        unpacked: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        result["adapter_of_rank_16"] = adapted(bench, loaded, unpacked)
    tell(result, given.json)


if __name__ == "__main__":
    main()
