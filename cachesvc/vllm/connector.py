"""The class that vLLM loads, once in its engine core and once in every worker.

A thin layer: `Planner` decides in the engine core, `Carrier` copies in the workers. If this
connector cannot serve a configuration exactly, vLLM runs without it and the log says why.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)

from cachesvc.vllm.carrier import Carrier
from cachesvc.vllm.identity import UnsupportedKv, identity_of
from cachesvc.vllm.link import NodeLink
from cachesvc.vllm.planner import Planner, Transfer
from cachesvc.vllm.reports import Reporter
from tiers.tier import TierName

logger = logging.getLogger(__name__)

PROBE_TIMEOUT_S = 2.0  # of a lookup; after that the prompt is a miss
_EXTRA = {"node", "reports"}


@dataclass(frozen=True)
class Transfers(KVConnectorMetadata):  # type: ignore[misc]
    """The transfers of one step, sent from the engine core to the workers."""

    loads: tuple[Transfer, ...] = ()
    saves: tuple[Transfer, ...] = ()


class CachesvcConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """Loads prefixes from a `cachesvc node` and stores what vLLM computed there."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        extra = transfer.kv_connector_extra_config or {}
        node = _node_of(extra)
        if transfer.kv_load_failure_policy != "recompute":
            raise ValueError(
                'cachesvc needs "kv_load_failure_policy": "recompute" in --kv-transfer-config, so '
                "that a block that cannot be loaded is computed and no request fails for it"
            )
        self._planner: Planner | None = None
        self._carrier: Carrier | None = None
        self._reporter: Reporter | None = None
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
            link = NodeLink(node, identity.layout, timeout_s=PROBE_TIMEOUT_S)
            self._planner = Planner(identity, link)
        else:
            self._carrier = Carrier(identity, node, _rank(identity.num_ranks))

    @property
    def requires_kv_delivery(self) -> bool:
        return False  # a block that is not stored is a later miss

    # In the engine core.

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        if self._reporter is not None:
            self._reporter.looked(request, num_computed_tokens)
        if self._planner is None:
            return 0, False
        num_tokens = self._planner.match(request, num_computed_tokens)
        return num_tokens, bool(num_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if self._planner is not None:
            (numbers,) = blocks.get_block_ids()
            self._planner.allocated(request, numbers, num_external_tokens)
        if self._reporter is not None:
            hits = self._planner.hits(request) if self._planner is not None else {}
            self._reporter.admitted(request, hits)

    def get_external_cache_hit_sources(
        self, request: Any, num_external_tokens: int
    ) -> dict[Any, int]:
        from vllm.v1.metrics.cache_hit_source import CacheHitSource

        names = {
            TierName.HOST: CacheHitSource.HOST,
            TierName.DISK: CacheHitSource.DISK,
            TierName.REMOTE: CacheHitSource.EXTERNAL_UNSPECIFIED,  # vLLM's name for a remote store
        }
        hits = self._planner.hits(request) if self._planner is not None else {}
        return {names[TierName(tier)]: tokens for tier, tokens in hits.items()}

    def build_connector_meta(self, scheduler_output: Any) -> Transfers:
        return Transfers(*self._planner.take()) if self._planner is not None else Transfers()

    def update_connector_output(self, connector_output: Any) -> None:
        if self._planner is not None:
            short = self._planner.fell_short(connector_output.invalid_block_ids)
            if self._reporter is not None:
                self._reporter.fell_short(short)
            self._planner.moved(
                connector_output.finished_recving or set(),
                connector_output.finished_sending or set(),
            )

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        if self._reporter is not None:
            self._reporter.finished(request)
        if self._planner is None:
            return False, None
        return self._planner.finished(request, block_ids)

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished(request, block_ids[0] if block_ids else [])

    def has_pending_push_work(self) -> bool:
        return self._planner is not None and self._planner.is_busy

    # In the workers.

    def register_kv_caches(self, kv_caches: Mapping[str, Any]) -> None:
        if self._carrier is None:
            return
        (group,) = self._kv_cache_config.kv_cache_groups
        ordered = {name: kv_caches[name] for name in group.layer_names}
        try:
            self._carrier.start(ordered, self._kv_cache_config.num_blocks)
        except UnsupportedKv as reason:
            raise ValueError(f"cachesvc cannot serve this engine's KV: {reason}") from reason

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        if self._carrier is not None:
            step = self._get_connector_metadata()
            assert isinstance(step, Transfers), step
            self._carrier.move(step.loads, step.saves)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Does nothing: loads are asynchronous, and vLLM runs no request before its blocks are
        loaded."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Does nothing: blocks are stored when their request has ended."""

    def wait_for_save(self) -> None:
        """See `save_kv_layer`."""

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        if self._carrier is None:
            return None, None
        loaded, saved = self._carrier.take_done()
        return saved, loaded

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._carrier.take_failed_blocks() if self._carrier is not None else set()

    def shutdown(self) -> None:
        if self._carrier is not None:
            self._carrier.close()
        if self._planner is not None:
            self._planner.close()
        if self._reporter is not None:
            self._reporter.close()


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


def _rank(num_ranks: int) -> int:
    if num_ranks == 1:
        return 0
    from vllm.distributed import get_tensor_model_parallel_rank

    return int(get_tensor_model_parallel_rank())
