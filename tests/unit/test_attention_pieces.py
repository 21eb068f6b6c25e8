"""The keys of a step are cut into pieces of about equal length, whichever sequence has them."""

import pytest
import torch

from engine.attention.pieces import ALIGNED, LEAST_KEYS, PROGRAMS, cut


def tensor(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize("num_programs", [1, 8, 33, 500])
@pytest.mark.parametrize("window", [None, 1, 100, 4096])
@pytest.mark.parametrize(
    "lengths",
    [[1], [1] * 300, [131_072] + [900] * 31, [512, 513, 511, 1024, 1], [64 * 8192] * 3, [65, 1]],
)
def test_every_key_that_is_seen_is_in_one_piece(lengths, window, num_programs):
    counts = [min(8, length) for length in lengths]
    rows, firsts = cut(tensor(lengths), tensor(counts), window, num_programs)
    budget = -(-PROGRAMS // num_programs)
    assert (3, len(lengths) + budget) == rows.shape, "a graph needs one size"
    pieces = rows.t().tolist()
    keys = 0
    for number, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        begin = 0 if window is None else max(0, length - count + 1 - window) // ALIGNED * ALIGNED
        keys += length - begin
        own = pieces[firsts[number] : firsts[number + 1]]
        assert own and all(sequence == number for sequence, _, _ in own)
        for (_, low, high), after in zip(own, [*own[1:], None], strict=True):
            assert low == begin and low % ALIGNED == 0 and low < high
            begin = high
            assert high == (length if after is None else after[1])
    for _, low, high in pieces[firsts[-1] :]:
        assert low >= high, "those left over are empty"
    longest = max(high - low for _, low, high in pieces)
    assert longest <= max(LEAST_KEYS, -(-keys // budget)) + ALIGNED
