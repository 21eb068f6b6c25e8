"""The scheduler's side of the connector: decides what to load and store for a request.

Runs in vLLM's engine core, on its scheduling loop. A separate thread asks the node how much of a
prompt it holds. The loop waits `WAIT_S` for the answer, which is enough for a lookup in memory. If
it takes longer, vLLM continues and asks again. The workers move the blocks. Blocks are stored when
a request ends, and vLLM keeps them until then, so a save never delays a step and never reads a
reused block.
"""

from collections.abc import Collection, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from cachesvc.vllm.identity import EngineIdentity, contents_of
from cachesvc.vllm.link import NodeLink
from cachesvc.vllm.reports import tag_of
from tiers.blocks.keys import BlockId, block_ids, token_bytes
from tiers.tier import TierName

WAIT_S = 0.005  # for the node's answer, at the first lookup of a prompt


@dataclass(frozen=True, slots=True)
class Transfer:
    """Blocks to move between the node and vLLM. `ids[r][i]` is rank r's part of block i."""

    request_id: str
    ids: tuple[tuple[BlockId, ...], ...]
    blocks: tuple[int, ...]  # vLLM's numbers


@dataclass(frozen=True, slots=True)
class _Load:
    """A load under way: vLLM's numbers of its blocks, and the tiers that hold them."""

    blocks: tuple[int, ...]
    tiers: tuple[TierName, ...]


@dataclass(slots=True)
class _Match:
    """The node's blocks of a request's prompt, from block `start` on."""

    start: int
    tiers: list[TierName]


@dataclass(frozen=True, slots=True)
class _Question:
    """A pending lookup of a prompt's blocks on the lookup thread."""

    start: int
    end: int
    answer: "Future[list[TierName]]"


def _one_thread() -> Executor:
    return ThreadPoolExecutor(1, thread_name_prefix="cachesvc-probe")


@dataclass(slots=True)
class Planner:
    """Plans the loads and stores of one engine."""

    identity: EngineIdentity
    link: NodeLink
    wait_s: float = WAIT_S
    _asking: Executor = field(default_factory=_one_thread)
    _asked: dict[str, _Question] = field(default_factory=dict)
    _matches: dict[str, _Match] = field(default_factory=dict)
    _hits: dict[str, dict[str, int]] = field(default_factory=dict)
    _loads: list[Transfer] = field(default_factory=list)
    _saves: list[Transfer] = field(default_factory=list)
    _loading: dict[str, _Load] = field(default_factory=dict)
    _failed: set[str] = field(default_factory=set)  # requests whose load failed, until they end
    _saving: set[str] = field(default_factory=set)

    def match(self, request: Any, num_computed_tokens: int) -> int | None:
        """The number of tokens the node has beyond `num_computed_tokens`. The last token is always
        computed.

        None while the node has not answered, because it reads a disk or asks a remote store. 0
        after a load of this request has failed: the node might promise the same blocks again.
        """
        size = self.identity.layout.block_size
        start, end = num_computed_tokens // size, (request.num_tokens - 1) // size
        self._matches.pop(request.request_id, None)
        if end <= start or not _has_identity(request) or request.skip_reading_prefix_cache:
            return 0
        if request.request_id in self._failed:
            return 0
        tiers = self._ask(request, start, end)
        if tiers:
            self._matches[request.request_id] = _Match(start, tiers)
        return None if tiers is None else len(tiers) * size

    def _ask(self, request: Any, start: int, end: int) -> list[TierName] | None:
        """The tiers of these blocks in the node; None if it has not answered yet."""
        name, wait_s = request.request_id, 0.0
        question = self._asked.get(name)
        if question is None or (question.start, question.end) != (start, end):
            runs = self._ids(request, start, end)
            question = _Question(start, end, self._asking.submit(self._probe, runs))
            self._asked[name], wait_s = question, self.wait_s
        try:
            tiers = question.answer.result(wait_s)
        except TimeoutError:
            return None
        del self._asked[name]
        return tiers

    def _probe(self, runs: Sequence[Sequence[BlockId]]) -> list[TierName]:
        """Asks the node. Lookup thread."""
        tiers = self.link.probe(runs[0])
        for run in runs[1:]:  # a block is complete if every rank has its part
            tiers = _farther(tiers, self.link.probe(run[: len(tiers)]))
        return tiers

    def allocated(self, request: Any, blocks: Sequence[int], num_tokens: int) -> None:
        """vLLM allocated blocks for `num_tokens` of the match: plans their load."""
        match = self._matches.pop(request.request_id, None)
        if not num_tokens or match is None:
            return
        size = self.identity.layout.block_size
        end = match.start + num_tokens // size
        tiers = match.tiers[: end - match.start]
        self._hits[request.request_id] = self._tokens_of(tiers)
        ids = self._ids(request, match.start, end)
        transfer = _transfer(request, ids, blocks[match.start : end])
        self._loads.append(transfer)
        self._loading[request.request_id] = _Load(transfer.blocks, tuple(tiers))

    def _tokens_of(self, tiers: Sequence[TierName]) -> dict[str, int]:
        size = self.identity.layout.block_size
        return {str(tier): tiers.count(tier) * size for tier in dict.fromkeys(tiers)}

    def fell_short(self, blocks: Collection[int]) -> dict[str, dict[str, int]]:
        """These blocks of vLLM's could not be loaded. It computes them and all behind them.

        Returns what was loaded, by the requests concerned. Call before `moved`.
        """
        short: dict[str, dict[str, int]] = {}
        for name, load in self._loading.items():
            places = (place for place, block in enumerate(load.blocks) if block in blocks)
            first = next(places, None)
            if first is not None:
                short[name] = self._hits[name] = self._tokens_of(load.tiers[:first])
        self._failed.update(short)
        return short

    def hits(self, request: Any) -> dict[str, int]:
        """Prompt tokens from the node, by tier: requested, and without what failed to load."""
        return self._hits.get(request.request_id, {})

    def finished(self, request: Any, blocks: Sequence[int]) -> tuple[bool, dict[str, Any]]:
        """The request has ended. Returns whether vLLM must keep its blocks until they are
        stored."""
        hits = self._hits.pop(request.request_id, {})
        self._matches.pop(request.request_id, None)
        self._asked.pop(request.request_id, None)
        self._failed.discard(request.request_id)
        params = {"cachesvc": {"hit_tokens": hits}}
        in_flight = getattr(request, "num_in_flight_tokens", 0)
        computed = (request.num_computed_tokens - in_flight) // self.identity.layout.block_size
        end = min(computed, len(blocks), _first_null(blocks))
        wanted = end and _has_identity(request) and tag_of(request).get("store", True)
        if request.request_id in self._loading or not wanted:
            return False, params
        self._saves.append(_transfer(request, self._ids(request, 0, end), blocks[:end]))
        self._saving.add(request.request_id)
        return True, params

    def take(self) -> tuple[tuple[Transfer, ...], tuple[Transfer, ...]]:
        """The loads and saves of the next step."""
        loads, saves = tuple(self._loads), tuple(self._saves)
        self._loads.clear()
        self._saves.clear()
        return loads, saves

    def moved(self, loaded: set[str], saved: set[str]) -> None:
        """The workers have finished these requests."""
        for name in loaded:
            self._loading.pop(name, None)
        self._saving -= saved

    def close(self) -> None:
        """Stops the lookup thread."""
        self._asking.shutdown(cancel_futures=True)
        self.link.close()

    @property
    def is_busy(self) -> bool:
        """Whether transfers are pending, so that vLLM must keep stepping."""
        return bool(self._loads or self._saves or self._saving)

    def _ids(self, request: Any, start: int, end: int) -> list[list[BlockId]]:
        """Each rank's ids of the request's full blocks from `start` to `end`."""
        size = self.identity.layout.block_size
        tokens = token_bytes(request.all_token_ids[: end * size])
        contents = contents_of(request.mm_features, end, size)
        roots = self.identity.roots_of(request)
        return [block_ids(root, tokens, size, contents)[start:] for root in roots]


def _transfer(request: Any, ids: Sequence[Sequence[BlockId]], blocks: Sequence[int]) -> Transfer:
    return Transfer(request.request_id, tuple(map(tuple, ids)), tuple(blocks))


def _has_identity(request: Any) -> bool:
    """False for a prompt of embeddings, which has no tokens to identify it."""
    return request.prompt_token_ids is not None and request.prompt_embeds is None


def _farther(some: Sequence[TierName], others: Sequence[TierName]) -> list[TierName]:
    order = list(TierName)
    return [max(pair, key=order.index) for pair in zip(some, others, strict=False)]


def _first_null(blocks: Sequence[int]) -> int:
    """The first index whose block vLLM has freed; its number is 0."""
    return next((place for place, number in enumerate(blocks) if number == 0), len(blocks))
