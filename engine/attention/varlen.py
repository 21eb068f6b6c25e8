"""Prefill that reads the pool in place, by torch's variable-length attention with a block table.

Needs torch 2.12 or later, CUDA and half precision. It is not documented which page sizes, head
sizes and devices each build of torch supports. So a trial at start-up decides: a small prompt whose
result must match the reference. Otherwise `attention.triton` gathers and uses SDPA. Engine thread
only.
"""

import inspect
import logging

import torch
from torch.nn.attention import varlen

from engine.attention.base import AttentionOptions, attend_dense, gather_blocks
from engine.attention.kv_pool import KvPool

logger = logging.getLogger(__name__)

_HALF = (torch.float16, torch.bfloat16)
_TOLERANCE = 0.03  # of the trial in bfloat16: 8 bits of a sum of values around 1


def has_block_tables() -> bool:
    """Whether this torch's `varlen_attn` takes a block table."""
    return "block_table" in inspect.signature(varlen.varlen_attn).parameters


def can_varlen(query: torch.Tensor, pool: torch.Tensor, options: AttentionOptions) -> bool:
    """Whether it supports these options: one precision throughout, windows, but no caps or
    sinks."""
    return query.dtype == pool.dtype and options.softcap is None and options.sinks is None


def attend_varlen(
    query: torch.Tensor,
    pool: torch.Tensor,
    table: torch.Tensor,
    start: int,
    options: AttentionOptions,
) -> torch.Tensor:
    """Causal attention of positions [start, start + T) over the blocks of `table`.

    query: [T, Hq, D]; pool: one layer, [num_blocks, 2, block_size, Hkv, D], of the query's dtype;
    table: the blocks that hold start + T positions. Returns [T, Hq, D].
    """
    num_queries, num_keys = query.shape[0], start + query.shape[0]
    device = query.device
    left = -1 if options.window is None else options.window - 1
    output = varlen.varlen_attn(
        query.contiguous(),
        pool[:, 0],
        pool[:, 1],
        _bounds(num_queries, device),
        _bounds(num_keys, device),
        num_queries,
        num_keys,
        scale=options.scaling,
        window_size=(left, 0),
        enable_gqa=query.shape[1] != pool.shape[3],
        seqused_k=torch.full((1,), num_keys, dtype=torch.int32, device=device),
        block_table=table.to(torch.int32)[None],
    )
    assert isinstance(output, torch.Tensor)
    return output


def varlen_works(pool: torch.Tensor) -> bool:
    """Try it on tensors like the pool's, and compare with the reference.

    pool: [num_blocks, num_layers, 2, block_size, Hkv, D]. Its contents are neither read nor
    written.
    """
    if pool.device.type != "cuda" or pool.dtype not in _HALF:
        return False
    if not has_block_tables():
        return _gathers(f"torch {torch.__version__} has no varlen_attn with block tables")
    return trial(pool.shape[3], pool.shape[4], pool.shape[5], pool.dtype, pool.device)


@torch.inference_mode()
def trial(
    block_size: int, num_kv_heads: int, dim: int, dtype: torch.dtype, device: torch.device
) -> bool:
    """Whether a prompt of two and a half blocks, half of it cached, gives the right result."""
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device).to(dtype)

    pool = normal(5, 2, 2, block_size, num_kv_heads, dim)
    num_keys = 5 * block_size // 2
    start = num_keys // 2
    query = normal(num_keys - start, 3 * num_kv_heads, dim)
    table = torch.tensor([3, 0, 4], device=device)
    options = AttentionOptions(scaling=dim**-0.5)
    keys, values = gather_blocks(KvPool(pool).layers[1], table, num_keys)
    expected = attend_dense(query, keys, values, start, options)
    try:
        actual = attend_varlen(query, pool[:, 1], table, start, options)
    except (RuntimeError, ValueError, NotImplementedError) as error:
        return _gathers(f"varlen_attn does not take them ({error})")
    if not torch.allclose(actual.float(), expected.float(), atol=_TOLERANCE, rtol=_TOLERANCE):
        off = (actual - expected).abs().max().item()
        return _gathers(f"varlen_attn is {off:.3g} off the reference, more than {_TOLERANCE}")
    return True


def _gathers(reason: str) -> bool:
    """Log what is given up, and why. False."""
    logger.info(f"prefill gathers its blocks instead of reading the pool in place: {reason}")
    return False


def _bounds(count: int, device: torch.device) -> torch.Tensor:
    """`[0, count]`, made on the device without a copy."""
    return torch.arange(0, count + 1, count, dtype=torch.int32, device=device)
