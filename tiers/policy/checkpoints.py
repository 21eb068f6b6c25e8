"""At which positions of a sequence checkpoints of recurrent states are taken.

A checkpoint is tens of MB, as much as thousands of tokens of KV, so not every block gets one. What
it may cost follows its bytes: `worth` is the number of blocks that take as much room. Taken are

- the last block boundary before the prompt's end, for the same prompt and for its next turn;
- the last block boundary within each prefix that the request asks to keep;
- where the prompt parts from one that was seen before, which a third may do as well;
- the end of an answer of `worth` blocks or more;
- a stride of `STRIDE * worth` blocks, for prompts that part early or whose end has left;
- where a sequence is preempted, because it will resume there.

Marconi (arXiv 2411.19379) takes forks and the last token of each answer. These rules were compared
with others by replay: docs/models.md, "Checkpoints".
"""

from collections.abc import Iterable

STRIDE = 8  # so that checkpoints by stride take at most an eighth of the room of their blocks


def worth_blocks(checkpoint_nbytes: int, block_nbytes: int) -> int:
    """The number of blocks that take as much room as a checkpoint, at least one."""
    return max(1, -(-checkpoint_nbytes // block_nbytes))


def positions(
    start: int,
    num_prompt: int,
    block_size: int,
    *,
    worth: int,
    parts: int,
    keeps: Iterable[int] = (),
) -> set[int]:
    """Block counts after `start`, at which the states of a prompt of `num_prompt` tokens are kept.

    `start` are the blocks from which it resumes; `parts` are those that it shares with others;
    `keeps` are numbers of tokens.
    """
    end = prompt_end(num_prompt, block_size)
    stride = STRIDE * worth
    asked = (min(kept // block_size, end) for kept in keeps)
    wanted = {end, min(parts, end), *range(stride, end, stride), *asked}
    return {number for number in wanted if number > start}


def prompt_end(num_prompt: int, block_size: int) -> int:
    """The longest position at which a prompt can be resumed. Its last token is always computed."""
    return (num_prompt - 1) // block_size


def keeps_stop(number: int, num_prompt: int, block_size: int, *, worth: int) -> bool:
    """Whether the state is kept where a sequence ends, after `number` blocks: if its answer is long
    enough, or if its prompt was not computed whole."""
    end = prompt_end(num_prompt, block_size)
    return number < end or number - end >= worth
