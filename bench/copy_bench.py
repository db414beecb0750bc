"""Measures copies: every case beside its reference, in rounds.

A round puts objects that are new and then gets them, so that they are read from the device's DRAM
(the write buffer keeps what it has flushed until it needs the room). Only the side "device" reads
what was put a round ago, which newer objects have pushed out since.
"""

from __future__ import annotations

import mmap
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final, TypeVar

from hymcache.bench.copy_cases import BATCH_BLOCKS, CopyCase
from hymcache.bench.cost import Cost, measure, process_cpu_s, written_bytes
from hymcache.bench.micro_summary import REFERENCE
from hymcache.bench.node_metrics import DEVICE_READ_BYTES, NodeMetrics
from hymcache.bench.perftest_reference import PerftestReference
from hymcache.bench.reference import (
    REFERENCE_MEMORY_BYTES,
    ReferenceKind,
    RunningReference,
    Transport,
)
from hymcache.bench.samples import SampleLog
from hymcache.bench.service import RunningService
from hymcache.errors import HymcacheError
from hymcache.lookup import BlockStatus, Client

# What one sample puts, and what is got again and again: more than the CPU's caches hold.
WORKING_SET_BYTES: Final = REFERENCE_MEMORY_BYTES
_CLIENT_BYTES: Final = 128 << 20
_FLUSH_TIMEOUT_S: Final = 120.0
_WRITTEN_TIMEOUT_S: Final = 10.0
_COMPLETION_S: Final = 0.05  # from the last write's submission to its end

Item = TypeVar("Item")  # a key of ours, or an offset of the reference's
Answer = TypeVar("Answer")
Batch = tuple[Sequence[Item], Sequence[memoryview]]
Clients = Mapping[tuple[Transport, bool], Client]  # by transport, and whether checksums are on


class CopyFailed(HymcacheError):
    """A put was skipped or a get missed where none may: the numbers would mean nothing."""


class CopyBench:
    """Holds the client's buffers, and remembers which objects were put when."""

    def __init__(
        self,
        service: RunningService,
        clients: Clients,
        references: Mapping[ReferenceKind, RunningReference],
        perftest: PerftestReference | None,
        log: SampleLog,
        *,
        get_passes: int,
    ) -> None:
        self._service = service
        self._clients = clients
        self._references = references
        self._perftest = perftest
        self._log = log
        self._get_passes = get_passes  # over the working set, in one sample
        memory = mmap.mmap(-1, _CLIENT_BYTES)
        memory.madvise(mmap.MADV_HUGEPAGE)
        memory.write(secrets.token_bytes(1 << 20) * (_CLIENT_BYTES >> 20))
        self._memory = memoryview(memory)
        for client in clients.values():
            client.register_memory(self._memory)
        self._put_last: dict[int, list[bytes]] = {}  # keys, by block size
        self._put_before: dict[int, list[bytes]] = {}  # in the round before
        self._node = NodeMetrics(service.node_http)

    def warm_up(self, cases: Sequence[CopyCase], write_buffer_bytes: int) -> None:
        """Every client touches all of the server's memory: no sample shall pay for page faults."""
        block_bytes = max(case.block_bytes for case in cases)
        for client in self._clients.values():
            for _ in range(write_buffer_bytes // WORKING_SET_BYTES):
                self._put(client, block_bytes)
                self._get(client, block_bytes, self._put_last[block_bytes], passes=1)
                self._node.wait_flushed(_FLUSH_TIMEOUT_S)
        for reference in self._references.values():
            self._measure_reference(reference, cases[0])
        for case in cases:
            if case.operation == "put":
                self._put(self._clients[case.transport, False], case.block_bytes)
                self._node.wait_flushed(_FLUSH_TIMEOUT_S)

    def run_round(self, round_index: int, cases: Sequence[CopyCase]) -> Iterator[CopyCase]:
        """Measures all cases once; yields each when it is done."""
        self._put_before = dict(self._put_last)
        for case in cases:
            # Whatever drifts within a round favours each side as often as the other.
            sides = [REFERENCE, *case.sides]
            for side in sides if round_index % 2 == 0 else sides[::-1]:
                self._node.wait_flushed(_FLUSH_TIMEOUT_S)
                cost, read_bytes = self._measure_side(case, side)
                self._log.add(
                    "copy",
                    case=case.name,
                    side=side,
                    round=round_index,
                    block_bytes=case.block_bytes,
                    moved_bytes=cost.moved_bytes,
                    device_read_bytes=read_bytes,
                    wall_s=cost.wall_s,
                    client_cpu_s=cost.client_cpu_s,
                    server_cpu_s=cost.server_cpu_s,
                    cpu_s_per_gb=cost.cpu_s_per_gb,
                )
            yield case

    def _measure_side(self, case: CopyCase, side: str) -> tuple[Cost, int]:
        if side == REFERENCE:
            if case.transport == "verbs":
                return self._measure_perftest(case), 0
            return self._measure_reference(self._references[case.transport], case), 0
        if side == "copy_alone":
            return self._measure_reference(self._references["shm_streaming"], case), 0
        client = self._clients[case.transport, side == "crc"]
        read_before = self._node.value(DEVICE_READ_BYTES)
        if case.operation == "put":
            cost = self._put(client, case.block_bytes, until_flushed=side == "flushed")
        elif side == "device":
            cost = self._get(client, case.block_bytes, self._put_before[case.block_bytes], 1)
        else:
            keys = self._put_last[case.block_bytes]
            cost = self._get(client, case.block_bytes, keys, self._get_passes)
        if case.transport == "verbs":
            _check_rdma(client)
        return cost, int(self._node.value(DEVICE_READ_BYTES) - read_before)

    def _measure_reference(self, reference: RunningReference, case: CopyCase) -> Cost:
        offsets = list(range(0, WORKING_SET_BYTES, case.block_bytes))
        is_put = case.operation == "put"
        batches = self._batches(offsets, case.block_bytes, 1 if is_put else self._get_passes)
        move = reference.copy.put if is_put else reference.copy.get
        return _measure(move, batches, (reference.server_pid,))[0]

    def _measure_perftest(self, case: CopyCase) -> Cost:
        if self._perftest is None:
            raise CopyFailed("there is nothing to compare RDMA with")
        passes = 1 if case.operation == "put" else self._get_passes
        return self._perftest.measure(case.operation, case.block_bytes, passes * WORKING_SET_BYTES)

    def _put(self, client: Client, block_bytes: int, *, until_flushed: bool = False) -> Cost:
        keys = [secrets.token_bytes(16) for _ in range(WORKING_SET_BYTES // block_bytes)]
        pids = self._service.pids
        server_before_s = sum(map(process_cpu_s, pids))
        written_before = written_bytes(self._service.node_pid)
        cost, answers = _measure(client.put, self._batches(keys, block_bytes, 1), pids)
        _check("put", answers)
        self._put_last[block_bytes] = keys
        if until_flushed:
            self._wait_written(written_before + WORKING_SET_BYTES)
            cost = replace(cost, server_cpu_s=sum(map(process_cpu_s, pids)) - server_before_s)
            self._node.wait_flushed(_FLUSH_TIMEOUT_S)
        return cost

    def _wait_written(self, total_bytes: int) -> None:
        # From outside, since every look at /metrics would cost the node CPU that is not the
        # flush's. Some file systems do not count; there the wait ends without an answer.
        deadline = time.monotonic() + _WRITTEN_TIMEOUT_S
        while written_bytes(self._service.node_pid) < total_bytes and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(_COMPLETION_S)

    def _get(self, client: Client, block_bytes: int, keys: Sequence[bytes], passes: int) -> Cost:
        batches = self._batches(keys, block_bytes, passes)
        cost, answers = _measure(client.get, batches, self._service.pids)
        _check("get", answers)
        return cost

    def _batches(self, items: Sequence[Item], block_bytes: int, passes: int) -> list[Batch[Item]]:
        places = range(0, _CLIENT_BYTES, block_bytes)
        blocks = [self._memory[place : place + block_bytes] for place in places]
        numbered = [(item, blocks[i % len(blocks)]) for i, item in enumerate(items)] * passes
        return [
            ([item for item, _ in batch], [block for _, block in batch])
            for batch in (
                numbered[i : i + BATCH_BLOCKS] for i in range(0, len(numbered), BATCH_BLOCKS)
            )
        ]


def _measure(
    move: Callable[[Sequence[Item], Sequence[memoryview]], Answer],
    batches: Sequence[Batch[Item]],
    server_pids: Sequence[int],
) -> tuple[Cost, list[Answer]]:
    answers: list[Answer] = []
    rest = iter(batches)
    bytes_per_call = sum(block.nbytes for block in batches[0][1])
    cost = measure(
        lambda: answers.append(move(*next(rest))), len(batches), server_pids, bytes_per_call
    )
    return cost, answers


def _check_rdma(client: Client) -> None:
    stats = client.stats()
    if stats["verbs_fallbacks"] or stats["tcp_read_bytes"] or stats["tcp_written_bytes"]:
        reason = stats["verbs_last_failure"] or "the node offers no RDMA"
        raise CopyFailed(f"bytes went over TCP instead of RDMA: {reason}")


def _check(what: str, answers: Sequence[Sequence[BlockStatus]]) -> None:
    for status in (status for answer in answers for status in answer):
        if status is not BlockStatus.OK:
            raise CopyFailed(f"a {what} was answered with {status.name}")
