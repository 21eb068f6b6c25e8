"""The scheduler's side of the connector: decides what to load and store for a request.

Runs in vLLM's engine core, on its scheduling loop. A separate thread asks the node how much of a
prompt it holds. The loop waits `WAIT_S` for the answer, which is enough for a lookup in memory.
Then vLLM goes on and asks again, slowly if it has nothing else. The workers move the blocks.
"""

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

from cachesvc.vllm.chains import RankIds, RequestChains
from cachesvc.vllm.groups import alignment
from cachesvc.vllm.identity import EngineIdentity, adapter_of
from cachesvc.vllm.link import NodeLink
from cachesvc.vllm.lookup import longest_prefix, probe_ranks
from cachesvc.vllm.reports import tag_of
from cachesvc.vllm.saves import Saves
from cachesvc.vllm.transfers import GroupBlocks, Transfer
from cachesvc.vllm.weighing import Weigher
from tiers.blocks.layout import BlockLayout
from tiers.errors import MissReason
from tiers.tier import TierName
from tiers.transfer.economy import LoadEconomy

_ORDER = tuple(TierName)
WAIT_S = 0.005  # for the node's answer, at the first lookup of a prompt
IN_STEP_S = 0.25  # for a load within a step: who asks meanwhile waits so much longer
ASSUMED_RATE = 1e9  # bytes a second of a load, until one was measured


@dataclass(frozen=True, slots=True)
class _Load:
    """A load under way: vLLM's numbers of the first group's blocks, and the tiers that hold
    them."""

    blocks: tuple[int, ...]
    tiers: tuple[TierName, ...]
    in_step: bool


@dataclass(slots=True)
class _Match:
    """What the node has of a request's prompt: the first group's blocks from token `start` on.
    `num_slower` more are held, and are computed because that is faster."""

    start: int
    tiers: list[TierName]
    num_slower: int
    chains: RequestChains
    in_step: bool = False


@dataclass(frozen=True, slots=True)
class _Question:
    """A pending lookup of a prompt's tokens on the lookup thread."""

    start: int
    end: int
    chains: RequestChains
    answer: "Future[tuple[list[TierName], int]]"


@dataclass(slots=True)
class Planner:
    """Plans the loads and stores of one engine. `links` reach the node, by layout.

    A load within a step spares vLLM two steps and the wait between them. After such a wait vLLM's
    scheduling loop spins for a second, and takes a processor from the step that computes. So a load
    is in a step if nothing else runs and it should take no longer than `IN_STEP_S`.

    If such a load falls short, vLLM computes the lacking blocks in its next steps, and has already
    listed them in its prefix cache. Should their request end before, another would find them there.
    So they, and all blocks that this step computed, are taken off that list before anyone looks.
    That needs a loop that plans no step before it knows the last one's end: `may_load_in_step`.
    """

    identity: EngineIdentity
    links: Mapping[BlockLayout, NodeLink]
    wait_s: float = WAIT_S
    may_load_in_step: bool = False
    weigher: Weigher = field(default_factory=lambda: Weigher(LoadEconomy()))
    saves: Saves = field(init=False)
    _asking: Executor = field(default_factory=lambda: ThreadPoolExecutor(1, "cachesvc-probe"))
    _asked: dict[str, _Question] = field(default_factory=dict)
    _matches: dict[str, _Match] = field(default_factory=dict)
    _hits: dict[str, dict[str, int]] = field(default_factory=dict)
    _slower: dict[str, int] = field(default_factory=dict)  # tokens held and not loaded
    _loads: list[Transfer] = field(default_factory=list)
    _loading: dict[str, _Load] = field(default_factory=dict)
    _failed: set[str] = field(default_factory=set)  # requests whose load failed, until they end
    _begun: set[str] = field(default_factory=set)  # requests that have blocks
    _step_blocks: set[int] = field(default_factory=set)  # of requests that begin in this step
    _rates: dict[TierName, float] = field(default_factory=dict)  # bytes a second of the last load

    def __post_init__(self) -> None:
        self.saves = Saves(self.identity)

    def match(self, request: Any, num_computed_tokens: int) -> int | None:
        """The number of tokens the node has beyond `num_computed_tokens`. The last token is always
        computed.

        None while the node has not answered, because it reads a disk or asks a remote store. 0
        after a load of this request has failed: the node might promise the same blocks again.
        """
        step = alignment(self.identity.groups)
        start, end = num_computed_tokens, (request.num_tokens - 1) // step * step
        self._matches.pop(request.request_id, None)
        if end <= start or start % step or not _has_identity(request):
            return 0
        if request.skip_reading_prefix_cache or request.request_id in self._failed:
            return 0
        match = self._ask(request, start, end)
        if match is None:
            return None
        if match.tiers and self._fits_step(request.request_id, match.tiers):
            match = replace(match, in_step=True)
        self._matches[request.request_id] = match
        return len(match.tiers) * self.identity.layout.block_size

    def loads_in_step(self, request: Any) -> bool:
        """Whether the step that computes the request is to load what `match` found."""
        match = self._matches.get(request.request_id)
        return match is not None and match.in_step

    def _fits_step(self, name: str, tiers: Sequence[TierName]) -> bool:
        """Whether a step may wait for these blocks. Not for a remote tier's: others use it too."""
        if not self.may_load_in_step or not self.identity.is_plain or self._begun - {name}:
            return False
        farthest = _farthest(tiers)
        nbytes = len(tiers) * self.identity.layout.nbytes
        in_time = nbytes <= IN_STEP_S * self._rates.get(farthest, ASSUMED_RATE)
        return farthest is not TierName.REMOTE and in_time

    def _ask(self, request: Any, start: int, end: int) -> _Match | None:
        """What the node has of these tokens; None if it has not answered yet."""
        name = request.request_id
        question = self._asked.get(name)
        is_alone = self._begun <= {name} and self._asked.keys() <= {name}
        wait_s = self.wait_s if is_alone else 0.0  # each look of vLLM's is a step of its worker
        if question is None or (question.start, question.end) != (start, end):
            chains = RequestChains.of(self.identity, request)
            answer = self._asking.submit(self._look, chains, start, end)
            question = _Question(start, end, chains, answer)
            self._asked[name], wait_s = question, self.wait_s
        try:
            tiers, num_slower = question.answer.result(wait_s)
        except TimeoutError:
            return None
        del self._asked[name]
        return _Match(start, tiers, num_slower, question.chains)

    def _look(self, chains: RequestChains, start: int, end: int) -> tuple[list[TierName], int]:
        """Asks the node, and has it load what is not in its memory: vLLM's next step may be far
        off. Only as far as that pays: returns the tiers of these blocks, and how many more are
        held. Lookup thread."""
        groups, size = self.identity.groups, self.identity.layout.block_size
        held = tiers = longest_prefix(groups, self._probe, chains, start, end)
        worth = self._worth(held, start)
        if worth < len(held):
            end = start + worth * size
            tiers = held[:worth]
            if not self.identity.is_plain:  # the others may be unable to resume there
                tiers = longest_prefix(groups, self._probe, chains, start, end)
            if self.weigher.tries():
                self._measure(held, chains, start)
        if _is_below(tiers):
            for number, first, stop in self._needed(start, start + len(tiers) * size):
                for ids in chains.ids(number, first, stop):
                    self.links[groups[number].layout].fetch(ids)
        return tiers, len(held) - len(tiers)

    def _measure(self, held: Sequence[TierName], chains: RequestChains, start: int) -> None:
        """Has the node load the last of these blocks in each tier below its memory, which nobody
        waits for, to tell what that costs now. The last is the least shared, so the system's page
        cache is the least likely to have it."""
        group, first = self.identity.groups[0], start // self.identity.layout.block_size
        for tier, place in {tier: place for place, tier in enumerate(held)}.items():
            for ids in chains.ids(0, first + place, first + place + 1):
                if tier is not TierName.HOST:
                    self.links[group.layout].fetch(ids)

    def _worth(self, tiers: Sequence[TierName], start: int) -> int:
        """How many leading blocks should be loaded."""
        groups, size = self.identity.groups, self.identity.layout.block_size
        end = start + len(tiers) * size
        nbytes = sum(
            (stop - first) * groups[number].layout.nbytes
            for number, first, stop in self._needed(start, end)
        )
        loads = self.links[self.identity.layout].loads
        return self.weigher.worth(tiers, loads, nbytes=nbytes, num_tokens=size, start=start)

    def _needed(self, start: int, end: int) -> Iterator[tuple[int, int, int]]:
        """The blocks of each group, from and to, that resume a prefix at `end` for which there is
        what comes before `start`."""
        for number, group in enumerate(self.identity.groups):
            first = max(start // group.block_size, group.first(end))
            yield number, first, end // group.block_size

    def _probe(self, number: int, runs: RankIds) -> list[TierName]:
        link = self.links[self.identity.groups[number].layout]
        return probe_ranks(link.probe, runs)

    def allocated(self, request: Any, blocks: Sequence[Sequence[int]], num_tokens: int) -> None:
        """vLLM allocated blocks, by group, for `num_tokens` of the match: plans their load."""
        match = self._matches.pop(request.request_id, None)
        self._begun.add(request.request_id)
        self._step_blocks.update(*blocks)
        if _has_identity(request) and tag_of(request).get("store", True):
            chains = match.chains if match is not None else None
            self.saves.admitted(request, chains or RequestChains.of(self.identity, request))
        if match is not None and match.num_slower:
            self.weigher.slower()
            self._slower[request.request_id] = match.num_slower * self.identity.layout.block_size
        if not num_tokens or match is None:
            return
        end = match.start + num_tokens
        tiers = match.tiers[: num_tokens // self.identity.layout.block_size]
        self._hits[request.request_id] = self._tokens_of(tiers)
        pieces = self._pieces(match, blocks, end)
        self._loads.append(
            Transfer(request.request_id, pieces, in_parts=_is_below(tiers), in_step=match.in_step)
        )
        self._loading[request.request_id] = _Load(pieces[0].blocks, tuple(tiers), match.in_step)

    def _pieces(
        self, match: _Match, blocks: Sequence[Sequence[int]], end: int
    ) -> tuple[GroupBlocks, ...]:
        """The blocks to load up to token `end`: every one that vLLM gave the request behind what
        it has, because vLLM will use and share them all."""
        pieces = []
        for number, group in enumerate(self.identity.groups):
            numbers, stop = blocks[group.number], end // group.block_size
            first = match.start // group.block_size
            while first < stop and not numbers[first]:
                first += 1
            ids = match.chains.ids(number, first, stop)
            pieces.append(GroupBlocks(number, ids, tuple(numbers[first:stop])))
        return tuple(pieces)

    def _tokens_of(self, tiers: Sequence[TierName]) -> dict[str, int]:
        size = self.identity.layout.block_size
        return {str(tier): tiers.count(tier) * size for tier in dict.fromkeys(tiers)}

    def fell_short(
        self, blocks: Collection[int], requests: Collection[str] = ()
    ) -> dict[str, dict[str, int]]:
        """These blocks of vLLM's could not be loaded. It computes them and all behind them. Or it
        begins these `requests` anew.

        Returns what was loaded, by the requests concerned. Call before `loaded`.
        """
        short: dict[str, dict[str, int]] = {}
        for name, load in self._loading.items():
            places = (place for place, block in enumerate(load.blocks) if block in blocks)
            first = 0 if name in requests else next(places, None)
            if first is not None:
                short[name] = self._hits[name] = self._tokens_of(load.tiers[:first])
                if load.in_step:
                    self.saves.unlist(self._step_blocks)
        self._failed.update(short)
        return short

    def hits(self, request: Any) -> dict[str, int]:
        """Prompt tokens from the node, by tier: requested, and without what failed to load."""
        return self._hits.get(request.request_id, {})

    def slower(self, request: Any) -> int:
        """Prompt tokens that the node has and that were not requested, as computing is faster."""
        return self._slower.get(request.request_id, 0)

    def finished(self, request: Any, blocks: Sequence[Sequence[int]]) -> dict[str, Any]:
        """The request has ended, with these blocks by group. Returns what its answer says."""
        told: dict[str, Any] = {"hit_tokens": self._hits.pop(request.request_id, {})}
        if slower := self._slower.pop(request.request_id, 0):
            told["miss_tokens"] = {MissReason.SLOWER_THAN_COMPUTE: slower}
        self._matches.pop(request.request_id, None)
        self._asked.pop(request.request_id, None)
        self._failed.discard(request.request_id)
        self._begun.discard(request.request_id)
        load = self._loading.get(request.request_id)
        if load is not None and not load.in_step:
            self.saves.forget(request)
        else:
            self.saves.finished(request, blocks)
        return {"cachesvc": told}

    def take(self) -> tuple[tuple[Transfer, ...], tuple[Transfer, ...]]:
        """The loads and saves of the next step."""
        loads, self._loads = tuple(self._loads), []
        return loads, self.saves.take()

    def loaded(self, requests: Collection[str], load_s: Mapping[str, float]) -> None:
        """A step is done. The workers have ended the loads of these requests and those within the
        step, which took so many seconds."""
        for name, seconds in load_s.items():
            load = self._loading.get(name)
            if load is not None and name not in self._failed and seconds > 0:
                nbytes = len(load.tiers) * self.identity.layout.nbytes
                self._rates[_farthest(load.tiers)] = nbytes / seconds
                if not _is_below(load.tiers):
                    self.weigher.copied(nbytes, seconds)
        in_step = [name for name, load in self._loading.items() if load.in_step]
        for name in (*requests, *in_step):
            self._loading.pop(name, None)
        self._step_blocks.clear()

    def renew(self) -> None:
        """Nobody's blocks are hits from now on, and what is stored is no hit for another engine:
        the weights may be others than those in the files."""
        weights = self.identity.scope.weights + os.urandom(16)  # no other engine's
        self.identity = replace(self.identity, scope=replace(self.identity.scope, weights=weights))
        self._asked.clear()
        self._matches.clear()
        self.saves.forget_all()

    def close(self) -> None:
        """Stops the lookup thread."""
        self._asking.shutdown(cancel_futures=True)
        for link in self.links.values():
            link.close()

    @property
    def is_busy(self) -> bool:
        """Whether transfers are pending, so that vLLM must keep stepping."""
        return bool(self._loading) or self.saves.is_busy


def _is_below(tiers: Sequence[TierName]) -> bool:
    """Whether any of these blocks is not in the node's memory."""
    return any(tier is not TierName.HOST for tier in tiers)


def _farthest(tiers: Sequence[TierName]) -> TierName:
    return max(tiers, key=_ORDER.index)


def _has_identity(request: Any) -> bool:
    """False for a prompt of embeddings, which has no tokens to identify it, and for one that uses
    an adapter whose files are not here."""
    if request.lora_request is not None and adapter_of(request.lora_request) is None:
        return False
    return request.prompt_token_ids is not None and request.prompt_embeds is None
