"""Cuts the keys of a step's sequences into pieces of about equal length, one for each program.

A sequence of 128k keys beside many short ones would otherwise be one program's work while the other
multiprocessors wait. The lengths are read on the device, so that a recorded graph cuts anew each
time it is replayed. Nothing here waits for the device.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

import torch

PROGRAMS = 264  # worth launching: two per multiprocessor of an H100, which has 132
LEAST_KEYS = 512  # of a piece; fewer are not worth a program
ALIGNED = 64  # keys: the largest tile, so that only a sequence's last tile is not full


class Pieces(NamedTuple):
    """P pieces of S sequences, a fixed number for given S.

    rows: [3, P] int32: each piece's sequence, its first key, and the end of its keys; those left
    over are empty. firsts: [S + 1] int32: the first piece of each sequence, and their end.
    """

    rows: torch.Tensor
    firsts: torch.Tensor


@dataclass(slots=True)
class PagedKeys:
    """The keys in the pool that S sequences attend to in a step, on the device.

    tables: [S, max_blocks] int32; lengths: [S] int32, the keys that a sequence's last query sees,
    including its own; counts: [S] int32, how many leading queries of a sequence are real (None if
    each has one).
    """

    tables: torch.Tensor
    lengths: torch.Tensor
    counts: torch.Tensor | None
    _pieces: dict[tuple[int, int | None], Pieces] = field(default_factory=dict)

    def cut(self, num_programs: int, window: int | None) -> Pieces:
        """The pieces of the keys. Layers of one shape share them."""
        key = num_programs, window
        if key not in self._pieces:
            self._pieces[key] = cut(self.lengths, self.counts, window, num_programs)
        return self._pieces[key]


def cut(
    lengths: torch.Tensor, counts: torch.Tensor | None, window: int | None, num_programs: int
) -> Pieces:
    """The pieces for a kernel that runs `num_programs` programs for each.

    lengths: [S] int32, the keys that each sequence's last query sees; counts: [S] int32, its
    queries (None: one). Keys before the first query's window are in no piece.
    """
    budget = -(-PROGRAMS // num_programs)
    begin = torch.zeros_like(lengths)
    if window is not None:
        first_seen = lengths if counts is None else lengths - counts + 1
        begin = (first_seen - window).clamp(min=0) // ALIGNED * ALIGNED
    keys = lengths - begin
    share = (keys.sum() + budget - 1) // budget
    share = (share.clamp(min=LEAST_KEYS) + ALIGNED - 1) // ALIGNED * ALIGNED
    ends = ((keys + share - 1) // share).cumsum(0)
    firsts = torch.cat([ends.new_zeros(1), ends])
    piece = torch.arange(len(lengths) + budget, device=lengths.device)
    sequence = torch.searchsorted(ends, piece, right=True).clamp(max=len(lengths) - 1)
    low = begin[sequence] + (piece - firsts[sequence]) * share
    high = torch.minimum(low + share, lengths[sequence])  # below `low` for those left over
    rows = torch.stack([sequence, low, high]).to(torch.int32)
    return Pieces(rows, firsts.to(torch.int32))
