"""Multi-head latent attention over cached latents (DeepSeek-V2, arXiv 2405.04434, section 2.1).

transformers' modules expand each token's latent c to a key and a value for every head, by
`kv_b_proj`. Here only c and the rotated part of the key, which all heads share, are cached, side by
side. For DeepSeek-V3 that is 576 numbers per token and layer instead of 40,960. The expansion moves
into the query and the output. With W_k and W_v the halves of `kv_b_proj` for one head:

    (W_k c) . q = c . (W_k^T q)          sum of p (W_v c) = W_v (sum of p c)

So the paths for ordinary attention serve it as one head whose values are the leading part of its
keys. Engine thread only.
"""

from typing import Any

import torch
from torch import nn

from engine.attention.agreement import heads_need_onednn
from engine.attention.base import KEPT, AttentionCall, PagedAttention
from engine.attention.dense import onednn_products, padded_rows
from engine.torchscript import script


class LatentAttention:
    """Added to an attention module. `rows` is the latest input of its `kv_b_proj`."""

    def __init__(self, key_weight: torch.Tensor, value_weight: torch.Tensor) -> None:
        """key_weight: [H, Dn, rank]; value_weight: [H, Dv, rank]."""
        self.absorbed = ByHead(key_weight)
        self.expanded = ByHead(value_weight.transpose(1, 2))
        self._rank = key_weight.shape[2]
        self.rows: torch.Tensor | None = None

    def attend(self, paged: PagedAttention, call: AttentionCall) -> torch.Tensor:
        """query: [T, H, Dn + Dr], rotated part last; key: the same shape, and only its rotated part
        is read. Returns [T, H, Dv]."""
        assert self.rows is not None, "kv_b_proj was not asked"
        query, key = call.query, call.key
        plain = self.absorbed.matrices.shape[1]
        latent = self.rows.reshape(-1, 1, self._rank)
        self.rows = None
        kept = torch.cat([latent, key[:, :1, plain:]], -1)  # [T, 1, rank + Dr]
        absorbed = self.absorbed(query[..., :plain])
        asked = torch.cat([absorbed, query[..., plain:]], -1)  # [T, H, rank + Dr]
        output = paged.attend(
            AttentionCall(call.layer, asked, kept, kept[..., : self._rank], call.options)
        )
        return self.expanded(output)


class ByHead:
    """Multiplies the rows of each head by a matrix of its own. On a CPU a row's product has the
    same bits beside any others, of two rows or more in all."""

    def __init__(self, matrices: torch.Tensor) -> None:
        """matrices: [H, K, N]. Kept contiguous, as `heads_need_onednn` compares them."""
        self.matrices = matrices.contiguous()
        self._on_cpu = matrices.device.type == "cpu"
        _, inputs, outputs = matrices.shape
        self._onednn = self._on_cpu and heads_need_onednn(inputs, outputs, matrices.dtype)

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """rows: [T, H, K]. Returns [T, H, N]."""
        if not self._on_cpu:
            return torch.bmm(rows.transpose(0, 1), self.matrices).transpose(0, 1)
        product: torch.Tensor = script(_padded_product)(rows, self.matrices, self._onednn)
        return product


def _padded_product(rows: torch.Tensor, matrices: torch.Tensor, onednn: bool) -> torch.Tensor:
    heads = padded_rows(rows.transpose(0, 1))
    products = onednn_products(heads, matrices) if onednn else torch.bmm(heads, matrices)
    return products[:, : rows.shape[0]].transpose(0, 1)


class _Unexpanded(nn.Module):
    """Replaces `kv_b_proj`: notes the latents and expands nothing. The module gets rows of zeros,
    which take no memory, to build its keys and values from."""

    def __init__(self, latent: LatentAttention, num_outputs: int) -> None:
        super().__init__()
        self._latent = latent
        self._num_outputs = num_outputs

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        self._latent.rows = rows
        return rows.new_zeros(1).expand(*rows.shape[:-1], self._num_outputs)


def absorb(model: nn.Module) -> int:
    """Make every latent attention module cache latents. Returns how many there are. Cannot be
    undone: the model then works only with paged attention."""
    found: list[Any] = [module for module in model.modules() if _is_latent(module)]
    for module in found:
        weight = module.kv_b_proj.weight
        heads = weight.view(module.num_heads, -1, weight.shape[1])
        key_weight, value_weight = heads.split([module.qk_nope_head_dim, module.v_head_dim], 1)
        latent = LatentAttention(key_weight, value_weight)
        setattr(module, KEPT, latent)
        module.kv_b_proj = _Unexpanded(latent, weight.shape[0])
    return len(found)


def _is_latent(module: Any) -> bool:
    needed = ("kv_b_proj", "num_heads", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    return all(hasattr(module, name) for name in needed) and hasattr(module, "layer_idx")
