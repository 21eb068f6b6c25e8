"""A capture of a graph that fails: attention and later captures go on as before."""

from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from engine.execution.cuda_graphs import Recorder


def check(device: str, small: bool) -> dict[str, Any]:
    if device != "cuda":
        return {"skipped": "there are no graphs"}
    ones = torch.ones(8, device=device)
    rows = torch.randn(1, 8, 64, 64, device=device, dtype=torch.bfloat16)

    def waits() -> torch.Tensor:
        return ones * ones.sum().item()  # which a capture refuses

    recorder, refused = Recorder(), ""
    try:
        recorder(waits)
    except RuntimeError as error:
        refused = str(error).splitlines()[0][:200]
    scaled_dot_product_attention(rows, rows, rows, is_causal=True)  # counts random numbers
    later = Recorder()(lambda: ones * 2)()
    torch.cuda.synchronize()
    ok = bool(refused) and later.tolist() == [2.0] * 8
    return {"what": "after a capture that failed", "ok": ok, "refused": refused}
