"""Parity and benches on a CUDA machine, in minutes and without a network; prints and writes JSON.

    python -m tests.bench.gpu_check [--device cuda] [--json artifacts/gpu-check.json] [--small]
                                    [--only PART ...]

Needs torch, triton, transformers, numpy and xxhash only (`hits` and `connector` lmdb and zstandard
too, `conform` all that a server needs), and no model: weights are random.
`--device cpu --small` runs the same code where there is no GPU; a test does. Each part's figures
stand under its name, and `failed` names what must not be: other tokens, other bytes, an error
beyond rounding, a kernel compiled in service.

A file for each thing that is checked: `parity` (tokens), `hits` (from every tier: bfloat16, states,
LoRA, grammars), `attention` (scores in bfloat16), `copies` (bytes that move), `connector` (to a
node, as under vLLM), `memory` (arena, big pools), `speed` (a long sequence beside short ones),
`recording` (a capture that fails), `conform` (`cachesvc conform` of a server, and of one over vLLM
where that is installed). `cachesvc bench ttft` tells the time to a first token.
"""
