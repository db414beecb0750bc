"""`hymcache bench micro`: copies, lookups and the index, beside what is as plain as can be."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from hymcache import _core
from hymcache.bench.copy_bench import WORKING_SET_BYTES, CopyBench
from hymcache.bench.copy_cases import CopyCase, copy_cases
from hymcache.bench.index_bench import IndexBench
from hymcache.bench.perftest_reference import PerftestReference, find_perftest
from hymcache.bench.reference import ReferenceKind, Transport, running_echo, running_reference
from hymcache.bench.samples import SampleLog, machine_context
from hymcache.bench.service import ServiceOptions, running_master, running_service
from hymcache.bench.targets import METADATA_OBJECTS
from hymcache.config import VerbsConfig
from hymcache.config_source import load_config
from hymcache.errors import ConfigError
from hymcache.limits import GIB, LOOKUP_KEYS_MAX
from hymcache.lookup import Client
from hymcache.transport.verbs import choose_gid, choose_port, load_library

# Room for three working sets: those of the last puts stay, and a node that is half full may flush
_WRITE_BUFFER_BYTES: Final = 3 * WORKING_SET_BYTES

Report = Callable[[str], None]


@dataclass(frozen=True)
class MicroOptions:
    """What a run does. `quick` is for a look, not for numbers to quote."""

    out_dir: Path
    rounds: int = 5
    quick: bool = False
    transports: tuple[Transport, ...] = ("shm", "tcp")

    @property
    def samples_path(self) -> Path:
        """The raw samples of the run."""
        return self.out_dir / "micro.jsonl"

    @property
    def cases(self) -> list[CopyCase]:
        """The copies of a round, in their order."""
        return copy_cases(self.transports)

    @property
    def lookups(self) -> int:
        """Calls in one sample of lookups."""
        return 2_000 if self.quick else 20_000

    @property
    def steps(self) -> int:
        """What `run_micro` reports: cases of all rounds, rounds of lookups, and filling."""
        return self.rounds * (len(self.cases) + 1) + 1


def run_micro(options: MicroOptions, report: Report, advance: Callable[[], None]) -> None:
    """Writes samples to `samples_path`.

    Raises:
        ChildFailed: a process of the service or of a reference failed.
        ConfigError: the disk has no room for the device, or RDMA cannot be measured here.
    """
    log = SampleLog(options.samples_path, machine_context())
    verbs = load_config().verbs
    # First, since it is what may be missing.
    perftest = _perftest(verbs, log) if "verbs" in options.transports else None
    _run_index(options, log, report, advance)
    _run_copies(options, log, report, advance, verbs=verbs, perftest=perftest)


def _run_index(
    options: MicroOptions, log: SampleLog, report: Report, advance: Callable[[], None]
) -> None:
    log_dir = options.out_dir / "logs"
    with (
        running_master(options.out_dir, log_dir) as master,
        running_echo(*_core.lookup_frame_bytes(LOOKUP_KEYS_MAX), log_dir) as echo,
    ):
        bench = IndexBench(master, echo, log)
        report(f"publishing {METADATA_OBJECTS} objects")
        bench.fill(METADATA_OBJECTS)
        advance()
        for round_index in range(options.rounds):
            report(f"round {round_index + 1}: lookups")
            bench.run_round(round_index, options.lookups)
            advance()


def _run_copies(
    options: MicroOptions,
    log: SampleLog,
    report: Report,
    advance: Callable[[], None],
    *,
    verbs: VerbsConfig,
    perftest: PerftestReference | None,
) -> None:
    cases = options.cases
    capacity_bytes = _capacity_bytes(cases, options)
    _check_disk(options.out_dir, capacity_bytes)
    sizes = ServiceOptions(
        capacity_bytes=capacity_bytes,
        staging_bytes=WORKING_SET_BYTES,
        write_buffer_bytes=_WRITE_BUFFER_BYTES,
    )
    log_dir = options.out_dir / "logs"
    with ExitStack() as stack:
        report("starting master, node and references")
        folder = stack.enter_context(tempfile.TemporaryDirectory(dir=options.out_dir))
        service = stack.enter_context(
            running_service(Path(folder), log_dir, embedded=False, options=sizes)
        )
        kinds: list[ReferenceKind] = []
        if "shm" in options.transports:
            kinds += ["shm", "shm_streaming"]
        if "tcp" in options.transports:
            kinds.append("tcp")
        references = {kind: stack.enter_context(running_reference(kind, log_dir)) for kind in kinds}
        clients = {
            (case.transport, side == "crc"): stack.enter_context(
                Client(
                    service.master,
                    transport=case.transport,
                    verify_checksums=side == "crc",
                    verbs=verbs,
                )
            )
            for case in cases
            for side in case.sides
            if side in {"plain", "crc"}
        }
        bench = CopyBench(
            service,
            clients,
            references,
            perftest,
            log,
            get_passes=1 if options.quick else 4,
        )
        report("warming up")
        bench.warm_up(cases, _WRITE_BUFFER_BYTES)
        for round_index in range(options.rounds):
            report(f"round {round_index + 1}: {cases[0].name}")
            for done in bench.run_round(round_index, cases):
                report(f"round {round_index + 1}: after {done.name}")
                advance()


def _perftest(config: VerbsConfig, log: SampleLog) -> PerftestReference:
    find_perftest()
    port = choose_port(load_library(), config)
    log.add("port", name=port.name, bits_per_second=port.port.bits_per_second)
    gid = choose_gid(port.gids, config)
    return PerftestReference(port, 0 if gid is None else gid.index)


def _capacity_bytes(cases: list[CopyCase], options: MicroOptions) -> int:
    puts = [case for case in cases if case.operation == "put"]
    in_rounds = options.rounds * sum(len(case.sides) for case in puts)
    before = 3 * _WRITE_BUFFER_BYTES // WORKING_SET_BYTES + len(puts)
    return (in_rounds + before) * WORKING_SET_BYTES + GIB  # segments end before they are full


def _check_disk(folder: Path, capacity_bytes: int) -> None:
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes < capacity_bytes + GIB:
        raise ConfigError(
            f"--out {folder}: {free_bytes / GIB:.1f} GiB free, a run of so many rounds needs "
            f"{capacity_bytes / GIB + 1:.1f} GiB; choose another folder or fewer --rounds"
        )
