"""SharedRegionOffloadingSpec: what vLLM's OffloadingConnector is told to use."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger
from vllm.v1.kv_offload.base import OffloadingSpec
from vllm.version import __version__ as vllm_version

from hymcache.connector.shared_region.block_memory import group_layouts
from hymcache.connector.shared_region.directory import Directory
from hymcache.connector.shared_region.facts import check_geometry, worker_facts
from hymcache.connector.shared_region.keys import RegionKeys
from hymcache.connector.shared_region.load_errors import WorkerReports, report_through_connector
from hymcache.connector.shared_region.manager import SharedRegionManager
from hymcache.connector.shared_region.mapped_region import attach_directory, open_store
from hymcache.connector.shared_region.metrics import metric_definitions
from hymcache.connector.shared_region.region_counts import RegionCounts
from hymcache.connector.shared_region.settings import read_settings
from hymcache.connector.shared_region.transfers import RegionTransfers
from hymcache.connector.shared_region.worker import SharedRegionWorker
from hymcache.connector.vllm_version import check_version

if TYPE_CHECKING:
    import torch
    from vllm.v1.kv_offload.base import (
        CanonicalKVCaches,
        OffloadingManager,
        OffloadingMetricMetadata,
        OffloadingWorker,
    )
    from vllm.v1.kv_offload.config import OffloadingConfig

    from hymcache.connector.block_layout import GroupLayout
    from hymcache.connector.ports import Transfers
    from hymcache.connector.shared_region.mapped_region import RegionStore

logger = init_logger("vllm.hymcache.region")

_warning = check_version(vllm_version)
if _warning is not None:
    logger.warning("%s", _warning)


class SharedRegionOffloadingSpec(OffloadingSpec):
    """KV blocks in memory that several hosts map, with the directory inside it.

    The scheduler looks up in the directory, the workers copy. Nothing else is between engines:
    what one has stored, all others of the same configuration find with plain loads.
    """

    def __init__(self, config: OffloadingConfig) -> None:
        """Raises ConfigError for settings that cannot be."""
        super().__init__(config)
        self.replicated_layout = config.replicated_layout
        self._settings = read_settings(config.extra_config)
        self._manager: SharedRegionManager | None = None

    @classmethod
    def build_metric_definitions(
        cls, extra_config: dict[str, Any]
    ) -> dict[str, OffloadingMetricMetadata]:
        """The metrics of a region, for the engine's /metrics."""
        del extra_config
        return metric_definitions()

    def get_manager(self) -> OffloadingManager:
        """The scheduler's half."""
        if self._manager is None:
            directory = Directory(lambda: attach_directory(self._settings), self._keys_for)
            self._manager = SharedRegionManager(directory, self._settings)
        return self._manager

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        """A worker's half: formats the region or attaches to it.

        Raises ConfigError where the region was formatted for another configuration.
        """
        layouts = group_layouts(kv_caches)
        pages = [[run.size for run in layout.runs] for layout in layouts]
        facts = worker_facts(self.config, self._settings, pages)
        reports = WorkerReports()
        report_through_connector(self, reports)
        store = open_store(self._settings, facts, max(layout.block_bytes for layout in layouts))
        return SharedRegionWorker(
            self._transfers(store, layouts, kv_caches.tensors[0].tensor.device),
            self._keys(facts),
            reports,
            RegionCounts(store.attachment, reports.stats),
            shard=0 if self.replicated_layout else self.config.parallel.rank,
            group_ids=[group.group_id for group in self.config.groups],
            chunk_blocks=self.blocks_per_chunk,
            deadline_s=self._settings.deadline_s,
            close=store.close,
        )

    def _transfers(
        self, store: RegionStore, layouts: list[GroupLayout], device: torch.device
    ) -> Transfers:
        def over_host_memory(host_layouts: list[GroupLayout]) -> Transfers:
            return RegionTransfers(
                store,
                host_layouts,
                load_threads=self._settings.load_threads,
                store_threads=self._settings.store_threads,
            )

        if device.type == "cpu":
            return over_host_memory(layouts)
        # Loaded for a GPU only.
        from hymcache.connector.cuda_device import CudaDevice
        from hymcache.connector.staged_transfers import StagedTransfers

        return StagedTransfers(
            lambda staged: over_host_memory(list(staged)),
            layouts,
            CudaDevice(device),
            staging_bytes=self._settings.staging_bytes,
        )

    def _keys_for(self, facts: Mapping[str, str | int]) -> RegionKeys:
        check_geometry(self.config, facts)
        return self._keys(facts)

    def _keys(self, facts: Mapping[str, str | int]) -> RegionKeys:
        shards = 1 if self.replicated_layout else self.config.parallel.world_size
        return RegionKeys(facts, shards=shards, blocks_per_chunk=self.blocks_per_chunk)
