"""What travels between the scheduler's and the workers' halves, once a step.

`shard` indexes below are those of shard_namespaces.Shards, `group` indexes those of
cache_groups.CacheGroups.groups.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, NamedTuple

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from hymcache.connector.shard_namespaces import Rank, WorkerLayout

# In a report: all blocks of a load hold what was asked for.
ALL_BLOCKS: Final = 1 << 62


class LoadPart(NamedTuple):
    """Blocks of one group to load: rows `first...` of each shard's plan into `block_ids`."""

    group: int
    plans: tuple[bytes, ...]
    first: int
    block_ids: list[int]


class LoadRequest(NamedTuple):
    """All that a request loads; it waits until every rank has done all parts."""

    req_id: str
    parts: tuple[LoadPart, ...]


class SaveJob(NamedTuple):
    """Blocks of one group to save, in the order of their prefix.

    `keys` and `name_spaces` are by shard; `keys[shard]` has 16 bytes for each block.
    """

    job: int
    group: int
    keys: tuple[bytes, ...]
    name_spaces: tuple[int, ...]
    block_ids: list[int]


@dataclass
class StepMetadata(KVConnectorMetadata):
    """Scheduler to workers: what to start, and which saves nobody waits for any more."""

    loads: list[LoadRequest] = field(default_factory=list)
    saves: list[SaveJob] = field(default_factory=list)
    dropped_saves: list[int] = field(default_factory=list)


class SaveReport(NamedTuple):
    """How a save went: ranks that are done with it, and the leading blocks all of them stored."""

    ranks: int
    stored: int


@dataclass
class StepReport(KVConnectorWorkerMetadata):
    """Workers to scheduler. Reports of all ranks in a step are joined before they arrive.

    `layouts` comes once from each rank. `loads` has, for each load that a rank finished, how many
    of its leading blocks hold what was asked for: ALL_BLOCKS, or fewer after a failure. With
    several cache groups that is 0, because vLLM then computes the whole request anew.
    """

    layouts: dict[Rank, tuple[WorkerLayout, ...]] = field(default_factory=dict)
    unsupported: str = ""
    saves: dict[int, SaveReport] = field(default_factory=dict)
    loads: dict[str, int] = field(default_factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> StepReport:
        """Joins the report of another rank, as vLLM asks for."""
        if not isinstance(other, StepReport):
            raise TypeError(f"not a StepReport: {type(other).__name__}")
        saves = dict(self.saves)
        for job, report in other.saves.items():
            mine = saves.get(job)
            saves[job] = (
                report
                if mine is None
                else SaveReport(mine.ranks + report.ranks, min(mine.stored, report.stored))
            )
        loads = dict(self.loads)
        for req_id, good in other.loads.items():
            loads[req_id] = min(good, loads.get(req_id, good))
        return StepReport(
            self.layouts | other.layouts, self.unsupported or other.unsupported, saves, loads
        )

    def __bool__(self) -> bool:
        return bool(self.layouts or self.unsupported or self.saves or self.loads)
