"""At which positions of a prompt checkpoints of recurrent states are taken.

A checkpoint is tens of MB, so not every block gets one. These are taken:

- at the last block boundary before the prompt's end, for the same prompt and for its next turn;
- where the prompt parts from one that was seen before, which a third may do as well;
- at a coarse stride, so that a hit never falls back by more than that.

The scheduler takes one more where a sequence stops running. See Marconi (arXiv 2411.19379), whose
choice is the first two. The stride is an estimate; it has not been compared by replay yet.
"""


def stride_of(checkpoint_nbytes: int, block_nbytes: int) -> int:
    """The stride in blocks: that over which the blocks are as large as a checkpoint, so that
    checkpoints by stride never take more room than what they continue."""
    return max(1, -(-checkpoint_nbytes // block_nbytes))


def positions(start: int, num_prompt: int, block_size: int, *, stride: int, parts: int) -> set[int]:
    """Block counts after `start`, at which the states of a prompt of `num_prompt` tokens are kept.

    `start` are the blocks from which it resumes; `parts` are those that it shares with others.
    """
    end = (num_prompt - 1) // block_size
    wanted = {end, min(parts, end), *range(stride, end, stride)}
    return {number for number in wanted if number > start}
