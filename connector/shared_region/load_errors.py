"""How a worker tells vLLM of blocks that did not load.

OffloadingConnector asserts that every job of its worker succeeds, and leaves unused what vLLM has
for failed loads: `get_block_ids_with_load_errors` for a model with one KV cache group, and
`failed_recving` for one with several, whose block ids are not unique. So a job of ours always
succeeds, and what of it failed is told this other way, in the pass that reports the job: with
`kv_load_failure_policy: recompute` vLLM computes those blocks. Nothing else would do: a worker has
no tokens to compute KV from, cannot ask the scheduler for another lookup, and must not leave
whatever bytes a block had before.

The connector of the process is made to ask the worker by giving it a class that derives from its
own. A subclass that users had to name instead would do the same, but then they could not write
`OffloadingConnector` and put it into MultiConnector as everybody does.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector

from hymcache.connector.shared_region.metrics import RegionStats
from hymcache.errors import ConfigError

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
    from vllm.v1.kv_offload.base import OffloadingSpec


@dataclass(slots=True)
class WorkerReports:
    """What a worker has to tell, gathered until the connector asks."""

    stats: RegionStats = field(default_factory=RegionStats)
    bad_blocks: set[int] = field(default_factory=set)
    failed_requests: set[str] = field(default_factory=set)

    def take_bad_blocks(self) -> set[int]:
        """The blocks that do not hold what was asked for, once."""
        taken, self.bad_blocks = self.bad_blocks, set()
        return taken

    def take_failed_requests(self) -> set[str]:
        """The requests whose loads failed, once."""
        taken, self.failed_requests = self.failed_requests, set()
        return taken


class _ReportingConnector(OffloadingConnector):
    """An OffloadingConnector that asks its worker; never made, only taken on."""

    hymcache_reports: WorkerReports

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Sends and loads that are done, with the requests whose loads failed."""
        results = super().get_transfer_results(finished_req_ids)
        results.failed_recving |= self.hymcache_reports.take_failed_requests()
        return results

    def get_block_ids_with_load_errors(self) -> set[int]:
        """The blocks of the loads just reported that do not hold what was asked for."""
        return self.hymcache_reports.take_bad_blocks()

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """What the worker counted since the last call."""
        return self.hymcache_reports.stats.take()


# MultiConnector keeps the stats of its connectors apart by this name.
_ReportingConnector.__name__ = OffloadingConnector.__name__


def report_through_connector(spec: OffloadingSpec, reports: WorkerReports) -> None:
    """Has the connector that made `spec`, in this worker's process, ask for `reports`.

    Raises ConfigError where there is none, or one of another class than it could take on.
    """
    connector = _connector_of(spec)
    if type(connector) is not OffloadingConnector:
        raise ConfigError(
            f"SharedRegionOffloadingSpec works with OffloadingConnector alone, not with "
            f"{type(connector).__name__}: it could not tell of a load that failed"
        )
    connector.__class__ = _ReportingConnector
    connector.hymcache_reports = reports


def _connector_of(spec: OffloadingSpec) -> Any:
    """The process' connector, or the one of MultiConnector's own that has this spec."""
    group: Any = get_kv_transfer_group() if has_kv_transfer_group() else None
    for connector in (group, *getattr(group, "_connectors", ())):
        worker = getattr(connector, "connector_worker", None)
        if worker is not None and worker.spec is spec:
            return connector
    return None
