"""What became of a prompt in the cache, told in runs of tokens. Pure; engine thread."""

from collections.abc import Iterator, Sequence
from itertools import groupby

from engine.request import BlockRun
from tiers.blocks.keys import PrefixKey
from tiers.tier import TierName


def runs_of(
    sources: Sequence[TierName],
    keys: Sequence[PrefixKey],
    *,
    tail_rows: int,
    tail_source: TierName | None,
    num_prompt: int,
    block_size: int,
) -> tuple[BlockRun, ...]:
    """The runs of a prompt whose leading full blocks came from `sources`, then `tail_rows` tokens
    of one more block from `tail_source`; the rest, and always the last token, is computed."""
    runs = list(_whole_runs(sources, keys, block_size))
    served = len(sources) * block_size
    if tail_source is not None and tail_rows:
        runs.append(BlockRun(tail_source, served, tail_rows, 1))
        served += tail_rows
    if served >= num_prompt:
        last = runs.pop()
        if last.num_tokens > 1:
            tokens = num_prompt - 1 - last.start
            runs.append(BlockRun(last.source, last.start, tokens, last.num_blocks, last.last_key))
        served = num_prompt - 1
    num_blocks = -(-num_prompt // block_size) - served // block_size
    return (*runs, BlockRun(None, served, num_prompt - served, num_blocks))


def _whole_runs(
    sources: Sequence[TierName], keys: Sequence[PrefixKey], block_size: int
) -> Iterator[BlockRun]:
    start = 0
    for source, group in groupby(sources):
        end = start + len(list(group))
        yield BlockRun(
            source, start * block_size, (end - start) * block_size, end - start, keys[end - 1]
        )
        start = end
