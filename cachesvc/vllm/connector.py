"""The class that vLLM loads, once in its engine core and once in every worker.

A thin layer: `Planner` decides in the engine core, `Carrier` copies in the workers. If this
connector cannot serve a configuration exactly, vLLM runs without it and the log says why.
"""

import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)

from cachesvc.model_files import UnsupportedKv
from cachesvc.vllm.carrier import Carrier
from cachesvc.vllm.identity import check_parallel, identity_of
from cachesvc.vllm.link import NodeLink
from cachesvc.vllm.planner import Planner
from cachesvc.vllm.reports import Reporter
from cachesvc.vllm.transfers import Transfer
from cachesvc.vllm.weighing import Weigher
from tiers.errors import MissReason
from tiers.tier import TierName
from tiers.transfer.economy import LoadEconomy

logger = logging.getLogger(__name__)

PROBE_S = 2.0  # for a lookup; after that the prompt is a miss
IDLE_WAIT_S = 0.01  # of a step that computes nothing, for the end of a transfer
_EXTRA = {"node", "reports", "weigh_loads"}


@dataclass(frozen=True)
class Transfers(KVConnectorMetadata):  # type: ignore[misc]
    """The transfers of one step, sent from the engine core to the workers."""

    loads: tuple[Transfer, ...] = ()
    saves: tuple[Transfer, ...] = ()
    is_idle: bool = False  # the step computes nothing


@dataclass(frozen=True)
class Ended(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """What has ended since the last step: saves by name, on how many ranks each, and loads, with
    the seconds of the slowest rank."""

    saves: Mapping[str, int]
    load_s: Mapping[str, float]

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "Ended":
        assert isinstance(other, Ended), other
        names = {*self.load_s, *other.load_s}
        slowest = {n: max(self.load_s.get(n, 0.0), other.load_s.get(n, 0.0)) for n in names}
        return Ended(Counter(self.saves) + Counter(other.saves), slowest)


class CachesvcConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """Loads prefixes from a `cachesvc node` and stores what vLLM computed there."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        extra = transfer.kv_connector_extra_config or {}
        node = _node_of(extra)
        if not isinstance(weighs := extra.get("weigh_loads", True), bool):
            raise ValueError(
                "weigh_loads is true, so that only what loads faster than it computes is loaded, "
                f"or false; not {weighs!r}"
            )
        for field, needed, why in (
            ("kv_role", "kv_both", "no engine only loads or only stores"),
            ("kv_load_failure_policy", "recompute", "a block that cannot be loaded is computed"),
        ):
            if getattr(transfer, field) != needed:
                told = f'cachesvc needs "{field}": "{needed}" in --kv-transfer-config'
                raise ValueError(f"{told}: {why}")
        check_parallel(vllm_config.parallel_config)
        self._planner: Planner | None = None
        self._carrier: Carrier | None = None
        self._reporter: Reporter | None = None
        self._failed_blocks: set[int] = set()  # not yet told
        self._load_s: dict[str, float] = {}  # not yet told
        if role is KVConnectorRole.SCHEDULER and extra.get("reports"):
            self._reporter = Reporter(Path(extra["reports"]))
        try:
            identity = identity_of(vllm_config, kv_cache_config)
        except UnsupportedKv as reason:
            logger.warning(f"cachesvc: nothing is cached below vLLM: {reason}")
            return
        if self._reporter is not None:
            self._reporter.ready(identity)
        if role is KVConnectorRole.SCHEDULER:
            layouts = dict.fromkeys(group.layout for group in identity.groups)
            links = {each: NodeLink(node, each, timeout_s=PROBE_S, maps=False) for each in layouts}
            # While a step runs, vLLM must plan no other: see `Planner.loads_in_step`.
            one_step = not vllm_config.scheduler_config.async_scheduling
            weigher = Weigher(LoadEconomy(enabled=weighs))
            self._planner = Planner(identity, links, may_load_in_step=one_step, weigher=weigher)
        else:
            from vllm.distributed import get_tensor_model_parallel_rank

            rank = get_tensor_model_parallel_rank() if identity.num_ranks > 1 else 0
            self._carrier = Carrier(identity, node, rank)

    @property
    def requires_kv_delivery(self) -> bool:
        return False  # a block that is not stored is a later miss

    # In the engine core.

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        if self._planner is not None:
            self._planner.saves.bind(gpu_block_pool)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        if self._reporter is not None:
            self._reporter.looked(request, num_computed_tokens)
        if self._planner is None:
            return 0, False
        num_tokens = self._planner.match(request, num_computed_tokens)
        return num_tokens, bool(num_tokens) and not self._planner.loads_in_step(request)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if self._planner is not None:
            self._planner.allocated(request, blocks.get_block_ids(), num_external_tokens)
        if self._reporter is not None:
            hits = self._planner.hits(request) if self._planner is not None else {}
            slower = self._planner is not None and self._planner.slower(request) > 0
            stop = MissReason.SLOWER_THAN_COMPUTE if slower else MissReason.ABSENT
            self._reporter.admitted(request, hits, stop)

    def get_external_cache_hit_sources(
        self, request: Any, num_external_tokens: int
    ) -> dict[Any, int]:
        from vllm.v1.metrics.cache_hit_source import CacheHitSource

        names = {TierName.HOST: CacheHitSource.HOST, TierName.DISK: CacheHitSource.DISK}
        other = CacheHitSource.EXTERNAL_UNSPECIFIED  # vLLM's name for a remote store
        hits = self._planner.hits(request) if self._planner is not None else {}
        return {names.get(TierName(tier), other): tokens for tier, tokens in hits.items()}

    def build_connector_meta(self, scheduler_output: Any) -> Transfers:
        if self._planner is None:
            return Transfers()
        state = getattr(scheduler_output, "kv_connector_block_state", None)
        self._planner.saves.step(state, scheduler_output.num_scheduled_tokens)
        is_idle = not scheduler_output.total_num_scheduled_tokens
        loads, saves = self._planner.take()
        loads_in_step = any(load.in_step for load in loads)
        self._planner.weigher.begun(_parts(scheduler_output), loads=loads_in_step)
        return Transfers(loads, saves, is_idle)

    def take_events(self) -> Iterable[Any]:
        """None: the node publishes its own. vLLM asks at the end of each step, which is timed."""
        if self._planner is not None:
            self._planner.weigher.ended()
        return ()

    def reset_cache(self) -> bool:
        """vLLM forgets what it has cached, maybe because its weights are others from now on."""
        if self._planner is not None:
            self._planner.renew()
            logger.warning("cachesvc: reset; until vLLM restarts, it shares its blocks with none")
            if self._reporter is not None:
                self._reporter.ready(self._planner.identity)
        return True

    def update_connector_output(self, connector_output: Any) -> None:
        if self._planner is None:
            return
        failed = connector_output.failed_recving
        short = self._planner.fell_short(connector_output.invalid_block_ids, failed)
        if self._reporter is not None:
            self._reporter.fell_short(short, begins_anew=bool(failed))
        ended = connector_output.kv_connector_worker_meta
        load_s = ended.load_s if isinstance(ended, Ended) else {}
        self._planner.loaded(connector_output.finished_recving or (), load_s)
        if isinstance(ended, Ended):
            self._planner.saves.saved(ended.saves)

    def has_pending_block_frees(self) -> bool:
        return self._planner is not None and self._planner.saves.is_busy

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        if self._reporter is not None:
            self._reporter.finished(request)
        if self._planner is None:
            return False, None
        return False, self._planner.finished(request, block_ids)  # what is stored has our reference

    def has_pending_push_work(self) -> bool:
        return self._planner is not None and self._planner.is_busy

    # In the workers.

    def register_kv_caches(self, kv_caches: Mapping[str, Any]) -> None:
        if self._carrier is None:
            return
        try:
            self._carrier.start(kv_caches, self._kv_cache_config.num_blocks)
        except UnsupportedKv as reason:
            raise ValueError(f"cachesvc cannot serve this engine's KV: {reason}") from reason

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        if self._carrier is not None:
            step = self._get_connector_metadata()
            assert isinstance(step, Transfers), step
            self._carrier.move(step.loads, step.saves)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Does nothing: vLLM runs no request before its blocks are loaded."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Does nothing: blocks are stored after the step that fills them, or later."""

    def wait_for_save(self) -> None:
        """See `save_kv_layer`."""

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        if self._carrier is None:
            return KVConnectorTransferResults(set(), set(), set())
        if self._get_connector_metadata().is_idle:
            # vLLM would ask again at once, and its loop would take the processor from the copies.
            self._carrier.wait(IDLE_WAIT_S)
        moved = self._carrier.take_loaded()
        self._failed_blocks |= moved.failed_blocks
        self._load_s |= moved.load_s
        return KVConnectorTransferResults(set(), moved.loaded, moved.failed)

    def get_block_ids_with_load_errors(self) -> set[int]:
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def build_connector_worker_meta(self) -> Ended | None:
        saved = self._carrier.take_saved() if self._carrier is not None else []
        load_s, self._load_s = self._load_s, {}
        return Ended(Counter(saved), load_s) if saved or load_s else None

    def shutdown(self) -> None:
        if self._carrier is not None:
            self._carrier.close()
        if self._planner is not None:
            self._planner.close()
        if self._reporter is not None:
            self._reporter.close()


def _parts(step: Any) -> Iterator[tuple[int, int]]:
    """Of each request in a step of vLLM's, its first token there, and how many."""
    cached = step.scheduled_cached_reqs
    places = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    places |= {new.req_id: new.num_computed_tokens for new in step.scheduled_new_reqs}
    return ((places.get(name, 0), num) for name, num in step.num_scheduled_tokens.items())


def _node_of(extra: Mapping[str, Any]) -> Path:
    """The node's socket. Raises ValueError for an unknown key."""
    if unknown := sorted(set(extra) - _EXTRA):
        raise ValueError(
            f"kv_connector_extra_config has {', '.join(unknown)}, which cachesvc does not know; "
            f"it knows {', '.join(sorted(_EXTRA))}"
        )
    node = extra.get("node")
    if not isinstance(node, str) or not node:
        raise ValueError(
            'cachesvc needs the socket of a node: "kv_connector_extra_config": '
            '{"node": "/run/cachesvc/node.sock"}; start one with cachesvc node'
        )
    return Path(node)
