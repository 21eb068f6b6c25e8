"""Which attention and which layers give a token other bits alone than in a chunk on a CPU.

    python -m tests.parity.bits [--threads 1 2 3] [--dtype bfloat16] [--few | --every]
                                [--lengths 40 700] [--part 3/20] [--operators FOLDER]

Prints a line for each shape that does, and ends with exit code 1 if there is one. It is run under
limits of torch's and oneDNN's instruction sets, which a process reads once, and needs no model.
With `--operators` compiled operators, which the folder keeps, are compared with torch's calls.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import numpy as np
import torch
from torch import nn

from engine.attention.base import AttentionCall, AttentionOptions
from engine.attention.cpu import CpuAttention
from engine.attention.latent import ByHead
from engine.batch import Span
from engine.models.packing import PackedLinear, has_bfloat16
from engine.operators.library import Operators
from engine.request import SamplingParams
from tiers.blocks.layout import BlockLayout, LayerLayout

BLOCK, PARAMS = 64, SamplingParams(temperature=0)
LAYERS = ((576, 960), (576, 1536), (1536, 576), (2048, 512))
LATENTS = ((16, 32), (64, 256), (256, 64), (128, 512), (512, 128))
AMPLE = 1 << 24  # bytes of working copies, and for prompts of thousands of tokens:
VAST = 1 << 28
LENGTHS = (40, 700)  # a prompt that ends within the first piece of keys, and one of several


@dataclass(frozen=True)
class Shape:
    """One layer's attention: KV heads, query heads for each, and numbers of a key and a value."""

    kv_heads: int
    groups: int
    dim: int
    value_dim: int
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    shared: bool = False

    @property
    def layers(self):
        about = {"shared": self.shared, "window": self.window}
        return (LayerLayout(self.kv_heads, self.dim, self.value_dim, **about),)

    def options(self):
        sinks = torch.linspace(-1, 4, self.kv_heads * self.groups) if self.sinks else None
        return AttentionOptions(self.dim**-0.5, self.window, self.softcap, sinks)


FEW = (
    Shape(3, 3, 64, 64),
    Shape(4, 1, 64, 64),
    Shape(2, 2, 128, 128),
    Shape(1, 12, 80, 80, window=150),
    Shape(2, 5, 16, 16, softcap=5.0),
    Shape(1, 6, 72, 64, shared=True),
    Shape(1, 16, 576, 512, shared=True),
    Shape(2, 4, 64, 64, window=130, sinks=True),
)
EVERY = FEW + tuple(
    Shape(kv_heads, groups, dim, dim, window)
    for kv_heads, groups in ((6, 1), (3, 2), (2, 3), (2, 7), (1, 8), (1, 71))
    for dim in (64, 80, 96, 128, 256)
    for window in (None, 333)
)


def differing(shape, lengths=LENGTHS, dtype=torch.float32, threads=(), fused=False):
    """The ways of cutting a prompt in which a row has other bits than in one chunk and with the
    first number of threads, by default as many as there are. If `fused`, those ways, but not that
    chunk, are computed by compiled operators."""
    threads = threads or [torch.get_num_threads()]
    for length in lengths:
        ample = VAST if length > 1024 else AMPLE
        torch.set_num_threads(threads[0])
        whole = computed(shape, length, [length], dtype, ample)
        for num_threads, name, budget in product(threads, ways(length), (ample, 0)):
            torch.set_num_threads(num_threads)
            rows = computed(shape, length, ways(length)[name], dtype, budget, fused)
            moved = (rows != whole).flatten(1).any(1).nonzero().flatten().tolist()
            if moved:
                kept = "" if budget else " without a copy"
                told = f"{length} tokens, {num_threads} threads, {name}{kept}"
                yield f"{told}: {len(moved)} rows, first {moved[0]}"


@torch.inference_mode()
def differing_layers(dtype: torch.dtype, sizes: Sequence[tuple[int, int]]) -> Iterator[str]:
    """The packed layers, by inputs and outputs, whose rows depend on how many there are."""
    generator = torch.Generator().manual_seed(1)
    for inputs, outputs in sizes:
        linear = nn.Linear(inputs, outputs, bias=False)
        linear.weight.data = torch.randn(outputs, inputs, generator=generator) / inputs**0.5
        packed = PackedLinear(linear.to(dtype))
        rows = torch.randn(512, inputs, generator=generator).to(dtype)
        for count in _differing_counts(packed, rows):
            yield f"a layer of {inputs} x {outputs}, {count} rows"


@torch.inference_mode()
def differing_latents(dtype: torch.dtype, sizes: Sequence[tuple[int, int]]) -> Iterator[str]:
    """The same of the matrices of heads by which latents are multiplied."""
    generator = torch.Generator().manual_seed(1)
    for inputs, outputs in sizes:
        matrices = torch.randn(4, outputs, inputs, generator=generator).to(dtype)
        rows = torch.randn(512, 4, inputs, generator=generator).to(dtype)
        for count in _differing_counts(ByHead(matrices.transpose(1, 2)), rows):
            yield f"matrices of heads of {inputs} x {outputs}, {count} rows"


def _differing_counts(multiply, rows):
    whole = multiply(rows)
    for count in (2, 3, 4, 7, 8, 16, 17, 20, 65, 130, 300):
        if not torch.equal(multiply(rows[5 : 5 + count]), whole[5 : 5 + count]):
            yield count


def ways(length):
    """Ways of cutting a prompt: the counts of tokens of its chunks. A prompt's cached beginning is
    a first chunk that an earlier step computed."""
    odd = [7, 1, 30, 2, 130, 1, 64, 17]
    ends = np.minimum(np.cumsum(odd), length)
    pieces = [int(n) for n in np.diff(ends, prepend=0, append=length) if n]
    return {
        "whole": [length],
        "in blocks": [min(BLOCK, length - at) for at in range(0, length, BLOCK)],
        "in odd pieces": pieces,
        "the last tokens alone": [length - 20, *[1] * 20],
        "all but one cached": [length - 1, 1],
    }


@torch.inference_mode()
def computed(
    shape: Shape,
    length: int,
    cuts: Sequence[int],
    dtype: torch.dtype,
    budget: int = AMPLE,
    fused: bool = False,
) -> torch.Tensor:
    """The outputs [length, Hq, Dv] of a prompt that is computed in chunks of these sizes."""
    generator = torch.Generator().manual_seed(length)
    query = torch.randn(length, shape.kv_heads * shape.groups, shape.dim, generator=generator)
    key = torch.randn(length, shape.kv_heads, shape.dim, generator=generator)
    value = torch.randn(length, shape.kv_heads, shape.value_dim, generator=generator)
    query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    value = key[..., : shape.value_dim] if shape.shared else value
    table = list(range(-(-length // BLOCK)))
    layout = BlockLayout(shape.layers, BLOCK, "float32")
    pool = torch.full((len(table), *layout.shape), torch.nan, dtype=dtype)
    attention = CpuAttention(pool, shape.layers, budget_bytes=budget)
    if fused:
        attention.fuse()
    attention._copies._buffer.fill_(torch.nan)  # rows that nobody has written change nothing
    outputs, start = [], 0
    for count in cuts:
        rows = slice(start, start + count)
        tokens = np.zeros(count, np.int32)
        attention.begin([Span(1, tokens, start, table, True, PARAMS)])
        options = shape.options()
        outputs.append(
            attention.attend(AttentionCall(0, query[rows], key[rows], value[rows], options))
        )
        attention.finish()
        start += count
    return torch.cat(outputs)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--few", action="store_true", help="three shapes, for a few seconds")
    parser.add_argument("--every", action="store_true", help="all shapes, and 8,000 tokens")
    parser.add_argument("--lengths", type=int, nargs="+", help="tokens of the prompts")
    parser.add_argument("--part", default="1/1", help="which part of the shapes, for a short run")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--operators", type=Path, help="the folder of the compiled operators")
    arguments = parser.parse_args()
    fused = arguments.operators is not None
    if fused and not Operators(arguments.operators).load():
        parser.error("there are no compiled operators here; the log says why")
    number, parts = map(int, arguments.part.split("/"))
    shapes = (EVERY if arguments.every else FEW[:3] if arguments.few else FEW)[number - 1 :: parts]
    lengths = arguments.lengths or (
        (*LENGTHS, 8000) if arguments.every else (LENGTHS[0], 330) if arguments.few else LENGTHS
    )
    dtype, found = getattr(torch, arguments.dtype), 0
    for shape in shapes:
        for way in differing(shape, lengths, dtype, arguments.threads, fused):
            found += 1
            print(f"{shape}, {way}", flush=True)
    for num_threads in arguments.threads if dtype == torch.float32 or has_bfloat16() else ():
        torch.set_num_threads(num_threads)
        for way in (*differing_layers(dtype, LAYERS), *differing_latents(dtype, LATENTS)):
            found += 1
            print(f"{num_threads} threads, {way}", flush=True)
    told = f"{len(shapes)} shapes, {lengths} tokens, {found} differences"
    print(f"{told}, {torch.backends.cpu.get_cpu_capability()}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
