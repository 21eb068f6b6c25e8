"""A prompt's hits and misses: counts, reasons and runs. Pure."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby

from engine.request import BlockRun, TokenCounts
from tiers.blocks.chain import Chain
from tiers.blocks.keys import BlockId, CacheScope, PrefixKey, child_key
from tiers.errors import MissReason
from tiers.tier import TierName


def count_hits(
    sources: Sequence[TierName],
    tail_source: TierName | None,
    tail_rows: int,
    num_prompt: int,
    block_size: int,
) -> TokenCounts:
    """Count the prompt tokens that are hits, by tier. The
    last token is always computed, so never a hit.

    Done once in a request's life. Tokens recomputed after a preemption are neither billed again nor
    sold as hits.
    """
    hits = dict.fromkeys(TierName, 0)
    standing = len(sources) * block_size
    for source in sources:
        hits[source] += block_size
    last = tail_source or (sources[-1] if sources else None)
    if tail_source is not None:
        hits[tail_source] += tail_rows
        standing += tail_rows
    if last is not None and standing >= num_prompt:
        hits[last] -= 1
    return TokenCounts.of(num_prompt, hits)


def miss_reasons(counts: TokenCounts, stop: MissReason, block_size: int) -> dict[MissReason, int]:
    """Missed tokens by reason: tokens of full blocks count for `stop`, the others as the tail."""
    standing = counts.hit
    missed_full = max(0, (counts.prompt - 1) // block_size * block_size - standing)
    tail = counts.prompt - standing - missed_full
    reasons = {MissReason.TAIL: tail}
    reasons[stop] = reasons.get(stop, 0) + missed_full
    return {reason: tokens for reason, tokens in reasons.items() if tokens}


def computed_otherwise(
    chain: Chain, scope: CacheScope, arithmetics: Sequence[bytes]
) -> Iterator[BlockId]:
    """The identities of a prompt's first full block under other arithmetics."""
    if not chain.keys:
        return
    first = chain.block_id(0)
    for arithmetic in arithmetics:
        root = replace(scope, arithmetic=arithmetic).root()
        key = child_key(root, first.tokens, first.content)
        yield first._replace(scope=root, parent=root, key=key)


def runs_of(
    sources: Sequence[TierName],
    keys: Sequence[PrefixKey],
    *,
    tail_rows: int,
    tail_source: TierName | None,
    num_prompt: int,
    block_size: int,
) -> tuple[BlockRun, ...]:
    """The runs of a prompt.

    Its leading full blocks came from `sources` (None: computed), and then `tail_rows` tokens of one
    more block from `tail_source`. The rest is computed, and always the last token.
    """
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
