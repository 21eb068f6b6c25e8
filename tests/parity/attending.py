"""One step of attention over a paged pool, by any path, with queries, keys and values of a seed."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from engine.attention.base import AttentionCall, AttentionOptions
from engine.batch import Span
from engine.request import SamplingParams
from tiers.blocks.layout import LayerLayout

PARAMS = SamplingParams(temperature=0)


def span(sequence_id: int, start: int, count: int, table: Sequence[int], **fields: Any) -> Span:
    return Span(sequence_id, np.zeros(count, np.int32), start, [*table], True, PARAMS, **fields)


def attended(
    path: Any,
    layers: Sequence[LayerLayout],
    spans: Sequence[Span],
    options: AttentionOptions,
    num_heads: int,
    seed: int,
) -> list[torch.Tensor]:
    """What each layer gives for the spans' tokens; a row of padding comes after them. The window is
    the layer's where the options have none."""
    generator = torch.Generator().manual_seed(seed)
    total = sum(len(span.tokens) for span in spans)
    outputs = []
    path.begin(spans)
    for number, layer in enumerate(layers):
        query = torch.randn(total + 1, num_heads, layer.key_dim, generator=generator)
        shape = total + 1, layer.num_heads
        key = torch.randn(*shape, layer.key_dim, generator=generator)
        value = torch.randn(*shape, layer.value_dim, generator=generator)
        value = key[..., : layer.value_dim] if layer.shared else value
        seen = options._replace(window=options.window or layer.window)
        outputs.append(path.attend(AttentionCall(number, query, key, value, seen))[:total])
        assert (total, num_heads, layer.value_dim) == outputs[-1].shape
    path.finish()
    return outputs
