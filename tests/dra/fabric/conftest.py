"""A simulated fabric manager for each dialect, in processes that all tests share."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, replace
from itertools import count
from typing import TypeVar

import pytest

from hymcache.dra.fabric import (
    ApplianceId,
    BladeId,
    BladeKey,
    ComposeRequest,
    FabricDialect,
    FabricManager,
    FabricSettings,
    FabricTimeouts,
    HostAgentSettings,
    HostId,
    RetryPolicy,
    connect_fabric,
)
from hymcache.dra.retry import Backoff
from tests.dra.simulator_process import APPLIANCE, SimulatorProcess

_Result = TypeVar("_Result")

BLADES = 28
HOSTS = (HostId("node-1"), HostId("node-2"))
BLADE_MIB = 4096
BLOCK_MIB = 512


@dataclass(frozen=True)
class Fabric:
    """A fabric manager, and a blade of it that no other test uses."""

    simulator: SimulatorProcess
    settings: FabricSettings
    blade: BladeKey

    def run(self, scenario: Callable[[FabricManager], Awaitable[_Result]]) -> _Result:
        """What a scenario returns, run with a client of its own."""

        async def connected() -> _Result:
            manager = connect_fabric(self.settings)
            try:
                return await scenario(manager)
            finally:
                await manager.aclose()

        return asyncio.run(connected())

    def request(self, owner: str = "claim-1", size_mib: int = 512, qos: int = 1) -> ComposeRequest:
        """Owners of different tests are different: allocations are named after them."""
        return ComposeRequest(
            blade=self.blade,
            size_mib=size_mib,
            qos=qos,
            hosts=HOSTS,
            owner=f"{self.blade.blade_id}/{owner}",
        )

    def with_timeouts(self, timeouts: FabricTimeouts) -> Fabric:
        return replace(self, settings=replace(self.settings, timeouts=timeouts))

    def fault(self, method: str, **body: object) -> None:
        """A fault of a request that concerns this test's blade."""
        self.simulator.fault(method=method, pathPart=f"/{self.blade.blade_id}", **body)


@pytest.fixture(scope="session")
def simulators(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Callable[[FabricDialect], SimulatorProcess]]:
    running: dict[FabricDialect, SimulatorProcess] = {}

    def start(dialect: FabricDialect) -> SimulatorProcess:
        if dialect not in running:
            running[dialect] = SimulatorProcess(
                tmp_path_factory.mktemp(dialect),
                *("--dialect", dialect, "--blades", str(BLADES)),
                *("--capacity", f"{BLADE_MIB}MiB", "--block", f"{BLOCK_MIB}MiB"),
            )
        return running[dialect]

    yield start
    for simulator in running.values():
        simulator.stop()


_next_blade: defaultdict[FabricDialect, Iterator[int]] = defaultdict(count)


def make_fabric(simulator: SimulatorProcess, dialect: FabricDialect) -> Fabric:
    """The client's settings, with short waits between attempts."""
    credentials = simulator.folder / "credentials"
    settings = FabricSettings(
        url=simulator.url,
        dialect=dialect,
        agents=HostAgentSettings(
            user_name=(credentials / "username").read_text(),
            password=(credentials / "password").read_text(),
            scheme="http",
        ),
        retry=RetryPolicy(backoff=Backoff(first_s=0.01, longest_s=0.05, attempts_max=3)),
    )
    name = BladeId(f"blade-{next(_next_blade[dialect])}")
    return Fabric(simulator, settings, BladeKey(ApplianceId(APPLIANCE), name))


@pytest.fixture(params=list(FabricDialect))
def fabric(
    request: pytest.FixtureRequest, simulators: Callable[[FabricDialect], SimulatorProcess]
) -> Fabric:
    dialect: FabricDialect = request.param
    return make_fabric(simulators(dialect), dialect)


@pytest.fixture
def paper_fabric(simulators: Callable[[FabricDialect], SimulatorProcess]) -> Fabric:
    return make_fabric(simulators(FabricDialect.PAPER), FabricDialect.PAPER)


@pytest.fixture
def public_fabric(simulators: Callable[[FabricDialect], SimulatorProcess]) -> Fabric:
    return make_fabric(simulators(FabricDialect.PUBLIC), FabricDialect.PUBLIC)
