"""HyMCacheConnector: vLLM's interface, in front of the two halves.

vLLM makes one instance in its scheduler and one in each worker; see scheduler_side.py and
worker_side.py for what they do, and docs/vllm.md for how to set it up.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any

from vllm.distributed import get_pp_group, get_tp_group
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.logger import init_logger
from vllm.version import __version__ as vllm_version

from hymcache.connector.block_layout import group_layout
from hymcache.connector.cache_groups import CacheGroups, cache_groups
from hymcache.connector.engine_memory import backend_facts, engine_transfers
from hymcache.connector.metadata import StepMetadata, StepReport
from hymcache.connector.metrics import StorePromMetrics, StoreStats
from hymcache.connector.scheduler_side import Roles, SchedulerSide
from hymcache.connector.settings import ConnectorSettings, read_settings
from hymcache.connector.shard_namespaces import (
    Rank,
    ShardNamespaces,
    Shards,
    WorkerLayout,
    engine_facts,
)
from hymcache.connector.store_core import CoreStore
from hymcache.connector.vllm_version import check_version
from hymcache.connector.worker_side import WorkerSide
from hymcache.errors import ConfigError

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = init_logger("vllm.hymcache")

_warning = check_version(vllm_version)
if _warning is not None:
    logger.warning("%s", _warning)


class HyMCacheConnector(KVConnectorBase_V1, SupportsHMA):
    """KV blocks in a remote store, shared by all engines of a namespace.

    A cache: what it cannot load is computed, what it cannot save is lost, and nothing that
    happens to the store reaches the engine as an error. Only a wrong configuration does, at the
    start, as a ConfigError.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        role: KVConnectorRole,
        kv_cache_config: KVCacheConfig,
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._settings: ConnectorSettings = read_settings(
            self._kv_transfer_config.kv_connector_extra_config
        )
        self._groups: CacheGroups = cache_groups(vllm_config, kv_cache_config)
        self._shards = Shards.of(vllm_config, kv_cache_config)
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        self._store: CoreStore | None = None
        self._unsupported_report: StepReport | None = None
        if role == KVConnectorRole.SCHEDULER:
            self._start_scheduler_side()

    def _start_scheduler_side(self) -> None:
        config = self._vllm_config
        _warn_of_traps(config, self._kv_transfer_config.kv_load_failure_policy)
        if self._groups.unsupported:
            logger.warning("HyMCache is off for this model: %s", self._groups.unsupported)
            return
        self._store = CoreStore(self._settings, f"vllm-scheduler-{os.getpid()}")
        self._store.warn_if_unreachable()
        self._scheduler = SchedulerSide(
            self._store.matcher(),
            self._groups,
            self._shards,
            ShardNamespaces(engine_facts(config, self._groups), self._groups, self._shards),
            roles=Roles(
                loads=self._kv_transfer_config.is_kv_consumer,
                saves=self._kv_transfer_config.is_kv_producer,
            ),
            prefix_caching=config.cache_config.enable_prefix_caching,
            clock=time.monotonic,
        )

    @property
    def requires_kv_delivery(self) -> bool:
        """False: a save that is lost is a future miss, nothing more."""
        return False

    # Worker

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Lays out the engine's memory and starts the transfers over it."""
        if self._groups.unsupported:
            return
        rank = Rank(get_pp_group().rank_in_group, get_tp_group().rank_in_group)
        try:
            layouts = [
                group_layout(
                    group, self._kv_cache_config, kv_caches, backend_facts(self._vllm_config)
                )
                for group in self._groups.groups
            ]
        except ConfigError as error:
            self._unsupported_report = StepReport(unsupported=str(error))
            return
        self._store = CoreStore(self._settings, f"vllm-worker-{os.getpid()}")
        device = next(iter(kv_caches.values())).device
        self._worker = WorkerSide(
            engine_transfers(self._store, layouts, device, self._settings),
            rank,
            self._shards,
            [WorkerLayout(layout.layout_id, layout.block_bytes) for layout in layouts],
            deadline_s=self._settings.deadline_s,
            verbs_fallbacks=self._store.verbs_fallbacks,
        )

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        """Starts this step's loads; vLLM calls it after the forward was launched."""
        if self._worker is not None:
            self._worker.start_loads(self._step_metadata())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing: all loads are asynchronous."""

    def save_kv_layer(
        self,
        layer_name: str,
        kv_layer: torch.Tensor,
        attn_metadata: AttentionMetadata,
        **kwargs: Any,
    ) -> None:
        """Nothing: whole blocks are saved after the forward."""

    def wait_for_save(self) -> None:
        """Starts this step's saves. Does not wait: the scheduler's half holds their blocks."""
        if self._worker is not None:
            self._worker.start_saves(self._step_metadata())

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """The requests whose loads are done; saves are reported in the worker's metadata."""
        results = self.get_transfer_results(finished_req_ids)
        return None, results.finished_recving or None

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """The requests whose loads are done, and those of them that failed."""
        if self._worker is None:
            return KVConnectorTransferResults()
        return self._worker.finished(finished_req_ids)

    def get_block_ids_with_load_errors(self) -> set[int]:
        """The blocks of the requests just reported that must be computed."""
        return set() if self._worker is None else self._worker.take_bad_blocks()

    def build_connector_worker_meta(self) -> StepReport | None:
        """What the scheduler's half should know of this step."""
        if self._worker is not None:
            return self._worker.take_report()
        report, self._unsupported_report = self._unsupported_report, None
        return report

    def _step_metadata(self) -> StepMetadata:
        metadata = self._get_connector_metadata()
        if not isinstance(metadata, StepMetadata):
            raise TypeError(f"not this connector's metadata: {type(metadata).__name__}")
        return metadata

    # Scheduler

    def bind_kv_cache_manager(self, kv_cache_manager: KVCacheManager) -> None:
        """Takes vLLM's cache manager, once, at the start."""
        super().bind_kv_cache_manager(kv_cache_manager)
        if self._scheduler is not None:
            self._scheduler.bind(kv_cache_manager)

    def on_new_request(self, request: Request) -> None:
        """Starts the lookup while the request still queues."""
        if self._scheduler is not None:
            self._scheduler.on_new_request(request)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Tokens beyond the local hit that can be loaded; None to be asked again."""
        if self._scheduler is None:
            return 0, False
        return self._scheduler.get_num_new_matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """Orders the load of `num_external_tokens` into the blocks allocated for it."""
        if self._scheduler is not None:
            self._scheduler.update_state_after_alloc(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """What the workers are to start in this step."""
        if self._scheduler is None:
            return StepMetadata()
        return self._scheduler.build_connector_meta(scheduler_output)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Takes the workers' reports of a step."""
        if self._scheduler is not None:
            self._scheduler.update_connector_output(connector_output)

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """As `request_finished_all_groups`, for a model with one KV cache group."""
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Saves the last full blocks. vLLM may free all: what is being saved is held."""
        if self._scheduler is not None:
            self._scheduler.request_finished(request, block_ids)
        return False, None

    def has_pending_push_work(self) -> bool:
        """Whether the engine must go on stepping, because blocks are held for saves."""
        return self._scheduler is not None and self._scheduler.has_pending_push_work()

    def has_pending_block_frees(self) -> bool:
        """Whether blocks held for saves come back soon, so that nothing need be preempted."""
        return self._scheduler is not None and self._scheduler.has_pending_block_frees()

    def reset_cache(self) -> bool | None:
        """Leaves all that was stored behind, as after a change of weights."""
        return True if self._scheduler is None else self._scheduler.reset_cache()

    # Both

    def get_kv_connector_stats(self) -> StoreStats | None:
        """What this half counted since the last call."""
        half = self._worker if self._worker is not None else self._scheduler
        return None if half is None else half.take_stats()

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> StoreStats:
        """The stats from what travelled between processes."""
        return StoreStats(data)

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[type, type],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> StorePromMetrics:
        """The connector's series in the engine's /metrics."""
        return StorePromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        """Ends all transfers and connections."""
        if self._worker is not None:
            self._worker.close()
            self._worker = None
        if self._store is not None:
            self._store.close()
            self._store = None


def _warn_of_traps(config: VllmConfig, load_failure_policy: str) -> None:
    """Settings under which vLLM does less with this connector than one would think."""
    if load_failure_policy != "recompute":
        logger.warning(
            'HyMCache: kv_load_failure_policy is "%s": a request whose load fails ends with an '
            'error; set it to "recompute"',
            load_failure_policy,
        )
    algorithm = config.cache_config.prefix_caching_hash_algo
    if algorithm.startswith("xxhash") and "PYTHONHASHSEED" not in os.environ:
        logger.warning(
            "HyMCache: with prefix_caching_hash_algo %s and no PYTHONHASHSEED every process hashes "
            "blocks its own way: engines will share nothing; set PYTHONHASHSEED to the same value "
            "on all, or use sha256",
            algorithm,
        )
