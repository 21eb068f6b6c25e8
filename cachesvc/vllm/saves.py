"""Which of vLLM's blocks are stored in the node, and until then kept from being reused.

    filled in a step ─► held: a reference of ours ─► its step is done ─► saved by every rank ─► free

vLLM frees a window's blocks and a state while their request runs. So a block of such a group is
held in the step that fills it, and stored in the next. Blocks of other groups are stored when their
request ends. No step waits for either. vLLM's scheduling loop only.

States are large, and vLLM hands over few: by default only that at the last block's end before the
end of a prompt, and that where it saw two prompts part. So states at the ends of other steps are
chosen here, where a step ends with a block. The distance between two chosen ones doubles, from the
first on, until the states take as many bytes as the KV of the tokens between them. A prompt that
parts from an earlier one resumes at the last of them.
"""

import logging
import sys
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil, lcm
from typing import Any

from cachesvc.vllm.chains import RequestChains
from cachesvc.vllm.groups import KvGroup
from cachesvc.vllm.identity import EngineIdentity
from cachesvc.vllm.transfers import GroupBlocks, Transfer

logger = logging.getLogger(__name__)

# Of vLLM's blocks, until they are stored. What is beyond is not stored, because a node that hangs
# must leave vLLM enough to go on.
MAX_HELD = 1 / 4  # windows' blocks and states
MAX_WAITING = 1 / 2  # blocks of ended requests, or all of one request


@dataclass(slots=True)
class _Running:
    """A request that runs. `held`: (group, place of the block) -> vLLM's number of it."""

    request: Any
    chains: RequestChains
    seen: int | None = None  # tokens up to which its blocks were looked at
    last_state: int = 0  # tokens in the last states that were held, or that it began with
    held: dict[tuple[int, int], int] = field(default_factory=dict)


@dataclass(slots=True)
class _Save:
    """Blocks being stored, and how many ranks have not done so."""

    blocks: list[int]
    ranks_left: int
    num_held: int  # of the blocks, those that were held while their request ran
    waiting: list[int]  # and those of groups that need all


class Saves:
    """The stores of one engine. `bind` it to vLLM's blocks first; until then nothing is stored."""

    def __init__(self, identity: EngineIdentity) -> None:
        self._identity = identity
        self._passing = [
            number for number, group in enumerate(identity.groups) if not group.is_whole
        ]
        self._aligned = [number for number in self._passing if identity.groups[number].is_aligned]
        self._state_every = states_every(identity.groups)
        self._pool: Any = None
        self._running: dict[str, _Running] = {}
        self._saving: dict[str, _Save] = {}
        self._planned: list[Transfer] = []
        self._num_saves = 0
        self._num_held = 0
        self._waiting: Counter[int] = Counter()  # blocks of ended requests, and by how many

    def bind(self, pool: Any) -> None:
        """`pool` is vLLM's `BlockPool`, which counts the users of blocks."""
        self._pool = pool

    @property
    def is_busy(self) -> bool:
        """Whether blocks are being stored, so that vLLM must keep stepping."""
        return bool(self._saving)

    def admitted(self, request: Any, chains: RequestChains) -> None:
        """The request was given its blocks, for the first time or again."""
        if (before := self._running.get(request.request_id)) is not None:
            self._drop(before)
        self._running[request.request_id] = _Running(request, chains)

    def step(self, state: Any, scheduled: Mapping[str, int]) -> None:
        """vLLM is about to run a step. Plan to store what earlier steps filled, and hold what this
        one fills.

        `state` is vLLM's `KVConnectorBlockState`, `scheduled` its tokens by request.
        """
        if not self._passing or self._pool is None:
            return
        for each in self._running.values():
            if each.held:
                self._save(each, self._filled(each))
        handed = getattr(state, "boundary_state_offloads", None) or {}
        for name in {*scheduled, *handed}:
            if (running := self._running.get(name)) is not None:
                num_tokens = scheduled.get(name, 0)
                self._hold_states(running, handed.get(name, ()))
                if self._aligned and num_tokens:
                    self._hold_end(running, state, num_tokens)
                self._hold_filled(running, state, num_tokens)

    def finished(self, request: Any, numbers: Sequence[Sequence[int]]) -> None:
        """The request has ended: plan to store what is left of it. `numbers`: its blocks, by
        group."""
        running = self._running.pop(request.request_id, None)
        if running is None or self._pool is None:
            return
        pieces = self._filled(running)
        computed = _computed(request)
        for number, group in enumerate(self._identity.groups):
            if group.is_whole:
                blocks = numbers[group.number]
                null = [*blocks, 0].index(0)  # the number of those that vLLM has freed
                end = min(computed // group.block_size, null)
                end = self._room_for(blocks[:end])
                self._pin(blocks[:end])
                self._waiting.update(blocks[:end])
                pieces += [(number, place, blocks[place]) for place in range(end)]
        self._save(running, pieces)
        self._drop(running)

    def forget(self, request: Any) -> None:
        """The request has ended, and nothing more of it is stored."""
        if (running := self._running.pop(request.request_id, None)) is not None:
            self._drop(running)

    def forget_all(self) -> None:
        """Store nothing more of what the running requests computed until now."""
        for running in self._running.values():
            self._drop(running)
        self._running.clear()

    def take(self) -> tuple[Transfer, ...]:
        """The stores of the next step."""
        planned, self._planned = tuple(self._planned), []
        return planned

    def saved(self, counts: Mapping[str, int]) -> None:
        """So many more ranks have ended these stores. vLLM may reuse what all have stored."""
        for name, count in counts.items():
            if (save := self._saving.get(name)) is None:
                continue
            save.ranks_left -= count
            if save.ranks_left <= 0:
                del self._saving[name]
                self._num_held -= save.num_held
                self._waiting.subtract(save.waiting)
                for block in save.waiting:
                    if not self._waiting[block]:
                        del self._waiting[block]
                self._free(save.blocks)

    def unlist(self, blocks: Collection[int]) -> None:
        """Take blocks off vLLM's prefix cache. Who uses them goes on."""
        if self._pool is not None:
            self._pool.evict_blocks({block for block in blocks if block})

    # Internals.

    def _hold_filled(self, running: _Running, state: Any, num_tokens: int) -> None:
        """Hold the blocks that this step fills, of groups that keep them in order."""
        request, seen = running.request, running.seen
        before = request.num_computed_tokens
        running.seen = end = max(before + num_tokens, seen or 0)
        numbers = None
        for number in self._passing:
            group = self._identity.groups[number]
            first = (before if seen is None else seen) // group.block_size
            if group.is_aligned or first >= end // group.block_size:
                continue
            numbers = numbers or state.get_block_ids(request.request_id)
            blocks = numbers[group.number] if numbers else ()
            for place in range(first, min(end // group.block_size, len(blocks))):
                self._hold(running, number, place, blocks[place])

    def _hold_states(self, running: _Running, handed: Iterable[tuple[int, int, int]]) -> None:
        """Hold the states that vLLM hands over: (its group, its block, tokens in the state)."""
        by_number = {self._identity.groups[number].number: number for number in self._passing}
        for theirs, block, num_tokens in handed:
            number = by_number.get(theirs)
            if number is not None and num_tokens % self._identity.groups[number].block_size == 0:
                place = num_tokens // self._identity.groups[number].block_size - 1
                self._hold(running, number, place, block)
                running.last_state = max(running.last_state, num_tokens)

    def _hold_end(self, running: _Running, state: Any, num_tokens: int) -> None:
        """Hold the states at the end of this step, if it ends a block far enough from the last
        ones. vLLM keeps the last block of a request until the step after it."""
        before = running.request.num_computed_tokens
        end = before + num_tokens
        if running.seen is None:
            running.last_state = max(running.last_state, before)
        far = min(running.last_state, self._state_every)
        sizes = [self._identity.groups[number].block_size for number in self._aligned]
        if end - running.last_state < max(far, 1) or any(end % size for size in sizes):
            return
        numbers = state.get_block_ids(running.request.request_id)
        for number, size in zip(self._aligned, sizes, strict=True) if numbers else ():
            blocks = numbers[self._identity.groups[number].number]
            if len(blocks) == end // size:  # else its last block is another
                self._hold(running, number, end // size - 1, blocks[-1])
                running.last_state = end

    def _hold(self, running: _Running, number: int, place: int, block: int) -> None:
        most = MAX_HELD * self._pool.num_gpu_blocks
        if block and self._num_held < most and (number, place) not in running.held:
            self._pin([block])
            self._num_held += 1
            running.held[number, place] = block

    def _filled(self, running: _Running) -> list[tuple[int, int, int]]:
        """Take the held blocks whose step is done: (group, place, vLLM's number)."""
        computed, groups = _computed(running.request), self._identity.groups
        done = [
            (number, place, block)
            for (number, place), block in running.held.items()
            if (place + 1) * groups[number].block_size <= computed
        ]
        for number, place, _ in done:
            del running.held[number, place]
        return done

    def _room_for(self, blocks: Sequence[int]) -> int:
        """How many of an ended request's leading blocks may wait too: all, if no others do."""
        room = int(MAX_WAITING * self._pool.num_gpu_blocks) - len(self._waiting)
        for place, block in enumerate(blocks) if self._waiting else ():
            room -= block not in self._waiting
            if room < 0:
                return place
        return len(blocks)

    def _save(self, running: _Running, filled: Sequence[tuple[int, int, int]]) -> None:
        """Plan to store blocks that we hold."""
        if not filled:
            return
        running.chains.grow(running.request, _computed(running.request))
        by_group: dict[int, dict[int, int]] = {}
        for number, place, block in filled:
            by_group.setdefault(number, {})[place] = block
        self._num_saves += 1
        name = f"{running.request.request_id} {self._num_saves}"
        pieces = tuple(_piece(running.chains, each, by_group[each]) for each in sorted(by_group))
        self._planned.append(Transfer(name, pieces))
        blocks = [block for _, _, block in filled]
        whole = [block for group, _, block in filled if self._identity.groups[group].is_whole]
        num_held = len(blocks) - len(whole)
        self._saving[name] = _Save(blocks, self._identity.num_ranks, num_held, whole)

    def _drop(self, running: _Running) -> None:
        """Give up what is held of a request."""
        self._num_held -= len(running.held)
        self._free(list(running.held.values()))
        running.held.clear()

    def _pin(self, blocks: Sequence[int]) -> None:
        self._pool.touch([self._pool.blocks[block] for block in blocks])

    def _free(self, blocks: Sequence[int]) -> None:
        """The end of a prefix first: vLLM evicts it before its beginning."""
        if blocks:
            self._pool.free_blocks([self._pool.blocks[block] for block in reversed(blocks)])


def states_every(groups: Sequence[KvGroup]) -> int:
    """Tokens whose KV takes as many bytes as the states at one position: whole blocks.

    Without other KV there is no such number, and the distance of states goes on doubling.
    """
    states = [group.layout for group in groups if group.is_aligned]
    token_bytes = sum(g.layout.nbytes / g.block_size for g in groups if g.is_whole)
    if not states or not token_bytes:
        return sys.maxsize
    step = lcm(*(layout.block_size for layout in states))
    return ceil(sum(layout.nbytes for layout in states) / token_bytes / step) * step


def _piece(chains: RequestChains, number: int, blocks: Mapping[int, int]) -> GroupBlocks:
    places = sorted(blocks)
    ids = chains.ids(number, places[0], places[-1] + 1)
    chosen = tuple(tuple(chain[place - places[0]] for place in places) for chain in ids)
    return GroupBlocks(number, chosen, tuple(blocks[place] for place in places))


def _computed(request: Any) -> int:
    """Tokens whose KV is there: without those of steps under way."""
    return int(request.num_computed_tokens) - int(getattr(request, "num_in_flight_tokens", 0))
