"""A fabric manager and the agents of its hosts in one process: composable memory on a laptop.

<state>/fabric.json              what the fabric manager knows
<state>/memory/                  the blades' bytes, in files that all hosts share
<state>/hosts/<host>/            each agent's records, and its CDI specs in cdi/
<state>/credentials/             user name and password of the agents
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from hymcache.address import Address
from hymcache.dra.host_agent.file_backend import FileBackend
from hymcache.dra.host_agent.service import HostAgentOptions, HostAgentService
from hymcache.dra.host_agent.sessions import Credentials as AgentCredentials
from hymcache.dra.simulator.app import make_simulator_app
from hymcache.dra.simulator.hardware import (
    Credentials,
    Fabric,
    SimulatedAppliance,
    SimulatedHost,
    make_blade,
)
from hymcache.dra.simulator.host_agents import HostAgents
from hymcache.dra.simulator.service import Dialect, FabricService
from hymcache.dra.state_file import write_atomically
from hymcache.errors import ConfigError
from hymcache.http_endpoint import HttpEndpoint

_APPLIANCE: Final = "appliance-0"
_USER_NAME: Final = "simulator"
_LOOPBACK: Final = "127.0.0.1"
# The fabric manager and the blades have no address of their own in a simulation.
_NOWHERE: Final = Credentials(
    username="simulator",
    password="none",  # noqa: S106 - nobody asks for it
    ip_address=_LOOPBACK,
    port=443,
)


@dataclass(frozen=True, slots=True)
class RemoteAgents:
    """Agents that run elsewhere: `url` has `{host}` in it where the host's name goes."""

    url: str
    credentials: AgentCredentials
    ca_file: Path | None = None

    def of(self, host_id: str) -> Credentials:
        """How a host's agent is reached."""
        protocol, _, place = self.url.replace("{host}", host_id).partition("://")
        try:
            address = Address.parse(place.rstrip("/"))
        except ValueError as error:
            raise ConfigError(f"--agent-url {self.url}: {error}") from error
        if protocol not in {"http", "https"}:
            raise ConfigError(f"--agent-url {self.url}: write e.g. https://{{host}}:8443")
        return Credentials(
            username=self.credentials.user_name,
            password=self.credentials.password,
            ip_address=address.host,
            port=address.port,
            protocol=protocol,
        )


@dataclass(frozen=True, slots=True)
class SimulationOptions:
    """What is simulated: blades of one appliance, each with a cable to every host."""

    listen: Address
    state: Path
    hosts: tuple[str, ...]
    blades: int
    channels: int
    block_mib: int
    blocks_a_channel: int
    dialect: Dialect = Dialect.PAPER
    tells_offsets: bool = True
    agents: RemoteAgents | None = None


class SimulatedSystem:
    """The simulation as a service of a process."""

    def __init__(self, options: SimulationOptions) -> None:
        """Nothing is opened or changed before `start`."""
        self._options = options
        self._endpoints: dict[str, str] = {}
        self._agents: dict[str, HostAgentService] = {}
        self._running: ExitStack | None = None

    @property
    def endpoints(self) -> Mapping[str, str]:
        """What listens where, once started."""
        return self._endpoints

    def start(self) -> None:
        """Serves when it returns. Raises ConfigError."""
        options = self._options
        with ExitStack() as stack:
            agents: dict[str, Credentials] = {}
            for host in options.hosts:
                if options.agents is None:
                    agents[host] = self._start_agent(host, stack)
                else:
                    agents[host] = options.agents.of(host)
            app = make_simulator_app(self._make_service(agents))
            endpoint = HttpEndpoint(app, options.listen, "--listen")
            endpoint.start()
            stack.callback(endpoint.stop)
            # First, since it is what most want to know.
            self._endpoints = {"fabric manager": f"http://{endpoint.address}"} | self._endpoints
            self._running = stack.pop_all()

    def stop(self) -> None:
        """Ends within about a second; the state stays. May be called again."""
        if self._running is not None:
            self._running.close()
            self._running = None

    def _start_agent(self, host: str, stack: ExitStack) -> Credentials:
        state = self._options.state
        credentials = _agent_credentials(state / "credentials")
        folder = state / "hosts" / host
        agent = HostAgentService(
            HostAgentOptions(
                listen=Address(_LOOPBACK, 0),
                credentials=credentials,
                state_folder=folder,
                cdi_root=folder / "cdi",
            ),
            FileBackend(state / "memory", host),
        )
        agent.start()
        stack.callback(agent.stop)
        self._agents[host] = agent
        address = Address.parse(agent.endpoints["host agent"])
        self._endpoints[f"agent of {host}"] = f"http://{address}"
        return Credentials(
            username=credentials.user_name,
            password=credentials.password,
            ip_address=address.host,
            port=address.port,
            protocol="http",
        )

    def _make_service(self, agents: Mapping[str, Credentials]) -> FabricService:
        options = self._options
        ca_file = options.agents.ca_file if options.agents else None
        service = FabricService(
            _make_fabric(options),
            dialect=options.dialect,
            tells_offsets=options.tells_offsets,
            state_path=options.state / "fabric.json",
            agents=HostAgents(str(ca_file) if ca_file else None, self._agents),
        )
        known = set(service.fabric.hosts)
        if known != set(options.hosts):
            raise ConfigError(
                f"{options.state}: was made for the hosts {', '.join(sorted(known))}; "
                "name the same hosts, or another --state"
            )
        # Agents listen elsewhere after a restart.
        for host, credentials in agents.items():
            service.fabric.hosts[host].credentials = credentials
        service.save_at_once()
        return service


def _make_fabric(options: SimulationOptions) -> Fabric:
    appliance = SimulatedAppliance(id=_APPLIANCE, credentials=_NOWHERE)
    fabric = Fabric(
        appliances={_APPLIANCE: appliance},
        hosts={host: SimulatedHost(id=host, credentials=_NOWHERE) for host in options.hosts},
    )
    for number in range(options.blades):
        blade = make_blade(
            f"blade-{number}",
            _NOWHERE,
            base_mib=fabric.end_mib,
            block_mib=options.block_mib,
            channels=options.channels,
            blocks_a_channel=options.blocks_a_channel,
            hosts=options.hosts,
        )
        appliance.blades[blade.id] = blade
    return fabric


def _agent_credentials(folder: Path) -> AgentCredentials:
    if not (folder / "password").exists():
        write_atomically(folder / "username", _USER_NAME.encode())
        write_atomically(folder / "password", secrets.token_urlsafe(24).encode())
    return AgentCredentials.read(folder)
