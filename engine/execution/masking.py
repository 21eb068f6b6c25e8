"""Grammars' masks on the device: uploaded as bits, 19 kB a row of 150k tokens, and applied at once.

On a GPU one kernel reads each row's bits. On a CPU there is nothing to launch, and rows are masked
one by one.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from engine.hardware import upload


def forbid(logits: torch.Tensor, rows: Sequence[int], words: NDArray[np.int32]) -> None:
    """Set logits to minus infinity where a mask has no bit, in place.

    logits: [R, vocabulary] float32; rows: the N rows that have a mask; words: [N, W], bit i of word
    w is token 32 w + i.
    """
    if logits.device.type == "cuda":
        from engine.execution.mask_kernel import forbid_packed

        forbid_packed(logits, upload(np.array(rows), logits.device), upload(words, logits.device))
        return
    for row, own in zip(rows, words, strict=True):
        bits = np.unpackbits(own.view(np.uint8), bitorder="little")[: logits.shape[1]]
        logits[row].masked_fill_(torch.from_numpy(bits == 0), -math.inf)
