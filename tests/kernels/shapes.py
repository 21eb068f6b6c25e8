"""The shapes of attention of the models in docs/models.md, as the kernel is launched for them."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

from engine.attention.base import AttentionOptions
from tests.kernels.compile import Taken, compiled

CAPABILITIES = [75, 80, 86, 89, 90, 100]
# What a program may take of a multiprocessor, in bytes: CUDA C++ Programming Guide, "Technical
# Specifications per Compute Capability".
SHARED = {75: 65_536, 80: 166_912, 86: 101_376, 89: 101_376, 90: 232_448, 100: 232_448}
BLOCK = 64
QUERIES = (1, 8)  # of a decode step, and of a tail

# Query heads per KV head and numbers per head, with a model that has them.
HEADS = {
    (1, 64): "GPT-2, OPT, SmolLM2-1.7B, Persimmon",
    (1, 80): "Phi-2, CTRL, Pythia-2.8B",
    (1, 96): "Phi-3-mini, GPT-NeoX-20B",
    (1, 128): "Llama 2 7B, OLMo, Command R, Aria, Helium",
    (1, 256): "Gemma 7B, Pythia-1B",
    (2, 64): "Granite 3 1B MoE",
    (2, 128): "Qwen3 0.6B, Gemma 2 and 3 27B",
    (2, 256): "Gemma 2 2B, Gemma 3 4B",
    (3, 64): "SmolLM2-135M",
    (3, 128): "Llama 3.2 3B, Phi-4-mini",
    (4, 64): "Llama 3.2 1B, Granite 3 2B, LFM2, EXAONE 4 1.2B",
    (4, 128): "Llama 3 8B, Mistral, Qwen3 8B, Phi-4, SmolLM3",
    (4, 256): "Gemma 3 1B, Gemma 3n",
    (4, 512): "Gemma 4 E4B, full layers",
    (5, 128): "Qwen2.5 14B and 32B, EXAONE 4 32B, ERNIE 4.5",
    (6, 128): "Qwen2.5 1.5B, Mixtral 8x22B, MiniMax M2",
    (7, 64): "Qwen2.5 0.5B",
    (7, 128): "Qwen2.5 7B",
    (8, 64): "gpt-oss",
    (8, 128): "Llama 3 70B, Qwen3 30B-A3B",
    (8, 256): "Gemma 2B",
    (8, 512): "Gemma 4, full layers",
    (9, 128): "StarCoder2 7B",
    (10, 128): "Seed-OSS 36B",
    (12, 128): "Command A, GLM-4.5, StarCoder2 3B, Mistral Large",
    (16, 128): "GLM-4 9B, Qwen3 235B, InternLM 3",
    (24, 128): "GLM-4 32B",
    (48, 128): "StarCoder",
    (71, 64): "Falcon 7B",
}
# Heads, numbers of the latent, and of its rotated key.
LATENTS = {
    (16, 512, 64): "DeepSeek-V2-Lite",
    (20, 512, 64): "GLM-4.7-Flash",
    (40, 256, 32): "MiniCPM3",
    (64, 512, 64): "Kimi K2, LongCat-Flash",
    (128, 512, 64): "DeepSeek-V3",
}
WITH_OPTIONS = {(2, 256), (2, 128), (8, 64), (4, 128)}  # Gemma 2's caps, gpt-oss's windows


@dataclass(frozen=True, slots=True)
class Shape:
    """One form of the kernel."""

    name: str
    dtype: str
    chosen: tuple[tuple[str, Any], ...]

    def compiled(self, capability: int) -> Taken:
        from engine.attention.kernels import _paged_kernel

        return compiled(_paged_kernel, dict(self.chosen), self.dtype, capability)


def all_shapes(capability: int) -> Iterator[Shape]:
    """The forms for a generation, once each: many models share one. Turing has no bfloat16."""
    half = "fp16" if capability < 80 else "bf16"
    known: set[tuple[object, ...]] = set()
    for shape in _shapes(capability, half):
        given = dict(shape.chosen)
        form = (
            shape.dtype,
            *(given[n] for n in ("ROWS", "TILE", "DIM", "ROTATED", "HAS_WINDOW", "HAS_SOFTCAP")),
        )
        if form not in known:
            known.add(form)
            yield shape


def _shapes(capability: int, half: str) -> Iterator[Shape]:
    from engine.attention.kernels import constants

    plain, both = AttentionOptions(1.0), AttentionOptions(1.0, window=4096, softcap=50.0)
    forms = {model: (*heads, 0) for heads, model in HEADS.items()}
    for latents, model in LATENTS.items():
        if capability < 80 and latents[1] > 256:
            continue  # 68 KiB at the least: gathered there, as a start on such a GPU says
        forms[model] = latents
    for model, (groups, dim, rotated) in forms.items():
        ways = [(half, plain)]
        if (groups, dim) in WITH_OPTIONS:
            ways += [("fp32", plain), (half, both)]
        for queries, (dtype, options) in product(QUERIES, ways):
            sizes = queries, groups, dim, 4 if dtype == "fp32" else 2
            about = {"block_size": BLOCK, "capability": divmod(capability, 10), "rotated": rotated}
            heads = f"{queries} x {groups} x {dim}{f' + {rotated}' if rotated else ''}"
            chosen = constants(*sizes, options, **about)
            yield Shape(f"{model}: {dtype}, {heads}", dtype, tuple(chosen.items()))
