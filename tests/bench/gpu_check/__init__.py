"""Parity and benches on a CUDA machine, in minutes and without a network; prints and writes JSON.

    python -m tests.bench.gpu_check [--device cuda] [--json artifacts/gpu-check.json] [--small]
                                    [--only PART ...]

Needs torch, triton, transformers, numpy and xxhash only (`hits`, `connector` and `service` lmdb and
zstandard too, `ttft` and `conform` all that a server needs), and no model: weights are random.
`--device cpu --small` runs the same code where there is no GPU; a test does. Each part's figures
stand under its name, and `failed` names what must not be: other tokens, other bytes, an error
beyond rounding, a kernel compiled in service.

A file for each thing that is checked: `parity` (tokens), `hits` (from every tier: bfloat16, states,
LoRA, grammars), `attention` (scores in bfloat16), `rows` (bits of a row beside others),
`copies` (bytes that move), `connector` (to a node, as under vLLM), `memory` (arena, big pools, long
prompts), `speed` (a long sequence beside short ones), `service` (the engine while prompts arrive
and rise), `ttft` (a question about a document, from each tier), `conform` (`cachesvc conform` of a
server, and of one over vLLM where that is installed).
"""
