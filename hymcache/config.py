"""The configuration of a process: one frozen object, from one TOML file.

Where a value comes from, the first that has it wins: `--set KEY=VALUE`, the environment
(`HYMCACHE_NODE__LISTEN` is `listen` in `[node]`), the file, the default. How the sources are
read and how faults are told is in config_source.py.
"""

from __future__ import annotations

import os
import re
import socket
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    SecretStr,
    model_validator,
)

from hymcache import limits
from hymcache.address import Address
from hymcache.errors import ConfigError
from hymcache.quantity import format_size, parse_duration_s, parse_size

# struct sockaddr_un has 108 bytes for a path, its end mark included.
_UNIX_PATH_BYTES_MAX: Final = 107
_SECRET_BYTES_MAX: Final = 1024


def _address(value: object) -> Address:
    if isinstance(value, Address):
        return value
    if not isinstance(value, str):
        raise ValueError('not an address; write host:port, e.g. "127.0.0.1:7400"')
    return Address.parse(value)


def _address_or_off(value: object) -> Address | None:
    return None if value in ("", None) else _address(value)


def _comma_separated(value: object) -> object:
    # An environment variable has no lists.
    return [part for part in value.split(",") if part.strip()] if isinstance(value, str) else value


def _reachable(address: Address) -> Address:
    if address.port == 0 or address.is_wildcard:
        raise ValueError("not an address to connect to; write the host and port of the master")
    return address


def _unix_path(path: Path) -> Path:
    path = path.expanduser().absolute()
    if len(os.fsencode(path)) > _UNIX_PATH_BYTES_MAX:
        raise ValueError(f"too long for a socket; at most {_UNIX_PATH_BYTES_MAX} bytes")
    return path


def _node_name(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9._-]{1,63}", name):
        raise ValueError("a name has 1 to 63 letters, digits, dots, dashes or underscores")
    return name


def _verbs_mtu(value: int) -> int:
    if value not in (0, 256, 512, 1024, 2048, 4096):
        raise ValueError("not an MTU; write 256, 512, 1024, 2048, 4096, or 0 for the largest")
    return value


def _milliseconds(value: object) -> float:
    return parse_duration_s(value, bare_unit="ms") * 1e3


def _seconds(value: object) -> float:
    return parse_duration_s(value)


@dataclass(frozen=True)
class Kind:
    """What docs/configuration.md calls the values of a key."""

    name: str


Size = Annotated[int, Kind("size"), BeforeValidator(parse_size), PlainSerializer(format_size)]
DurationS = Annotated[float, Kind("seconds"), BeforeValidator(_seconds)]
DurationMs = Annotated[int, Kind("milliseconds"), BeforeValidator(_milliseconds)]
_Address = Annotated[Address, Kind("address"), BeforeValidator(_address), PlainSerializer(str)]
_AddressOrOff = Annotated[
    Address | None,
    Kind("address"),
    BeforeValidator(_address_or_off),
    PlainSerializer(lambda address: "" if address is None else str(address)),
]
_Masters = Annotated[
    tuple[Annotated[_Address, AfterValidator(_reachable)], ...],
    Kind("list of addresses"),
    BeforeValidator(_comma_separated),
    Field(min_length=1, max_length=16),
]
_Path = Annotated[Path, Kind("path"), PlainSerializer(str)]
_UnixPath = Annotated[_Path, AfterValidator(_unix_path)]


def _shown_as(text: str) -> dict[str, Any]:
    # What docs/configuration.md says in place of a default that depends on the host.
    return {"default_text": text}


def _runtime_dir() -> Path:
    from_session = os.environ.get("XDG_RUNTIME_DIR")
    if from_session and Path(from_session).is_dir():
        return Path(from_session) / "hymcache"
    if os.geteuid() == 0:
        return Path("/run/hymcache")
    return Path(tempfile.gettempdir()) / f"hymcache-{os.geteuid()}"


def _state_dir() -> Path:
    if os.geteuid() == 0:
        return Path("/var/lib/hymcache")
    return Path(os.environ.get("XDG_STATE_HOME") or "~/.local/state").expanduser() / "hymcache"


def _node_socket(validated: dict[str, Any]) -> Path:
    # Nodes of one host differ in their ports; one that lets the system choose has its process id.
    port = validated["listen"].port
    return _runtime_dir() / f"node-{port or f'pid{os.getpid()}'}.sock"


def _advertised_host(validated: dict[str, Any]) -> str:
    listen: Address = validated["listen"]
    return socket.gethostname() if listen.is_wildcard else listen.host


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)


class MasterConfig(_Section):
    """The metadata service: which node holds which object."""

    listen: _Address = Field(
        default=Address("127.0.0.1", 7400), description="Where clients and nodes connect to."
    )
    grpc: _AddressOrOff = Field(
        default=Address("127.0.0.1", 7401), description='Administration by gRPC; "" turns it off.'
    )
    http: _AddressOrOff = Field(
        default=Address("127.0.0.1", 7402), description='/metrics and /healthz; "" turns them off.'
    )
    lease_ms: DurationMs = Field(
        default=limits.LEASE_MS,
        ge=100,
        le=600_000,
        description="How long a node is listed after its last heartbeat, in ms.",
    )
    connections_max: int = Field(
        default=limits.CONNECTIONS_MAX,
        ge=1,
        le=1_000_000,
        description="Connections above this number are closed at once.",
    )


class NodeConfig(_Section):
    """A storage node: it owns a device and the objects on it."""

    name: Annotated[str, AfterValidator(_node_name)] = Field(
        default_factory=socket.gethostname,
        description="What the node is called by masters; unique among the nodes of a service.",
        json_schema_extra=_shown_as("the host name"),
    )
    listen: _Address = Field(
        default=Address("127.0.0.1", 7410), description="Where clients connect to."
    )
    advertise: str = Field(
        default_factory=_advertised_host,
        min_length=1,
        max_length=253,
        description="The host that clients are told to connect to.",
        json_schema_extra=_shown_as("the host of `listen`; the host name if that is a wildcard"),
    )
    unix: _UnixPath = Field(
        default_factory=_node_socket,
        description="The socket through which clients on this host share memory with the node.",
        json_schema_extra=_shown_as(
            "`node-PORT.sock` in `$XDG_RUNTIME_DIR/hymcache`, `/run/hymcache` (root) or "
            "`/tmp/hymcache-UID`"
        ),
    )
    http: _AddressOrOff = Field(
        default=Address("127.0.0.1", 7412), description='/metrics and /healthz; "" turns them off.'
    )
    masters: _Masters = Field(
        default=(Address("127.0.0.1", 7400),), description="The masters that the node publishes to."
    )
    connections_max: int = Field(
        default=limits.CONNECTIONS_MAX,
        ge=1,
        le=1_000_000,
        description="Connections above this number are closed at once.",
    )
    verbs: Literal["auto", "on", "off"] = Field(
        default="auto",
        description="RDMA: `auto` offers it where there is a device for it, with `on` the node "
        "does not start without.",
    )


class DeviceConfig(_Section):
    """The CXL-hybrid memory device of a node."""

    backend: Literal["file"] = Field(
        default="file", description="`file`: DRAM staging in front of a file or a block device."
    )
    path: _Path = Field(
        default_factory=lambda: _state_dir() / "device.dat",
        description="The file or block device; a file is made if it is not there.",
        json_schema_extra=_shown_as(
            "`device.dat` in `/var/lib/hymcache` (root) or `~/.local/state/hymcache`"
        ),
    )
    capacity: Size = Field(
        default=10 * limits.GIB,
        ge=limits.MIB,
        description="Bytes of the device that may hold objects.",
    )
    staging: Size = Field(
        default=limits.GIB,
        ge=limits.MIB,
        description="DRAM that objects are read into before clients fetch them.",
    )
    write_buffer: Size = Field(
        default=512 * limits.MIB,
        ge=limits.MIB,
        description="DRAM that takes new objects until they are flushed; when full, they are "
        "skipped.",
    )
    io: Literal["auto", "io_uring", "threads"] = Field(
        default="auto", description="How the device is read and written; `auto` prefers io_uring."
    )
    io_depth: int = Field(
        default=16, ge=1, le=1024, description="Reads and writes in flight at once."
    )
    preallocate: bool = Field(
        default=True,
        description="Reserve the file's blocks at the start, so that the disk cannot fill up.",
    )

    @model_validator(mode="after")
    def _buffer_fits(self) -> Self:
        if self.write_buffer > self.capacity:
            raise ValueError(
                f"write_buffer ({format_size(self.write_buffer)}) is larger than capacity "
                f"({format_size(self.capacity)}); make it smaller"
            )
        return self


class VerbsConfig(_Section):
    """RDMA: which device, and the connections over it. Nodes and clients read the same keys."""

    device: str = Field(
        default="", max_length=63, description='The RDMA device, e.g. "mlx5_0"; "" chooses one.'
    )
    port: int = Field(default=0, ge=0, le=254, description="Its port, from 1; 0 chooses one.")
    gid_index: int = Field(
        default=-1,
        ge=-1,
        le=4095,
        description="The row of the port's GID table to use; -1 chooses RoCE v2, IPv4 first.",
    )
    mtu: Annotated[int, AfterValidator(_verbs_mtu)] = Field(
        default=0,
        description="Bytes of payload in a packet: 256, 512, 1024, 2048 or 4096; 0 takes the most "
        "that both ports have.",
    )
    traffic_class: int = Field(
        default=0, ge=0, le=255, description="The packets' traffic class (DSCP * 4 in RoCE v2)."
    )
    service_level: int = Field(
        default=0, ge=0, le=15, description="Their service level; in RoCE the VLAN's priority."
    )
    timeout: int = Field(
        default=14,
        ge=1,
        le=31,
        description="How long an acknowledgement may take, as 4.096 us * 2^timeout; 14 is 67 ms.",
    )
    retry_count: int = Field(
        default=7, ge=0, le=7, description="How often a packet is sent again before giving up."
    )
    rnr_retry: int = Field(
        default=7, ge=0, le=7, description="The same for a peer that is not ready; 7: no bound."
    )
    max_rd_atomic: int = Field(
        default=16,
        ge=1,
        le=255,
        description="READs that a connection has under way at once, as far as both devices can.",
    )
    queue_depth: int = Field(
        default=128, ge=4, le=8192, description="Work requests posted at once; more are split."
    )
    spin_us: int = Field(
        default=20,
        ge=0,
        le=10_000,
        description="How long a batch is polled for before its thread sleeps until the event.",
    )
    bounce: Size = Field(
        default=16 * limits.MIB,
        ge=64 * limits.KIB,
        le=limits.GIB,
        description="Registered memory of a connection, through which memory passes that is not.",
    )
    windows: Literal["auto", "off"] = Field(
        default="auto",
        description="`auto`: keys are good for one block only, where the node's device has memory "
        "windows of type 2; `off`: for the node's whole memory.",
    )


class ClientConfig(_Section):
    """A client: `hymcache.Client`, the command line and the vLLM connector."""

    masters: _Masters = Field(
        default=(Address("127.0.0.1", 7400),),
        description="The masters to ask, in order of preference.",
    )
    transport: Literal["auto", "shm", "verbs", "tcp"] = Field(
        default="auto",
        description="How bytes move; `auto` takes `shm` where the node is on this host, else "
        "`verbs` where both ends have an RDMA device, else `tcp`.",
    )
    deadline_s: DurationS = Field(
        default=limits.LOAD_DEADLINE_S,
        gt=0,
        le=3600,
        description="The longest that one call may take, in seconds.",
    )
    connect_timeout_s: DurationS = Field(
        default=limits.CONNECT_TIMEOUT_S,
        gt=0,
        le=3600,
        description="The longest wait for a connection, in seconds.",
    )
    verify_checksums: bool = Field(default=True, description="Check the crc32c of what was read.")


class Config(_Section):
    """All of it. Sections that a process does not use are validated all the same."""

    secret: SecretStr | None = Field(
        default=None, description="What peers must prove to know. Prefer `secret_file`."
    )
    secret_file: Annotated[Path | None, Kind("path")] = Field(
        default=None,
        description="A file that holds the secret; white space at its end does not count.",
    )
    master: MasterConfig = Field(default_factory=MasterConfig)
    node: NodeConfig = Field(default_factory=NodeConfig)
    device: DeviceConfig = Field(default_factory=DeviceConfig)
    client: ClientConfig = Field(default_factory=ClientConfig)
    verbs: VerbsConfig = Field(default_factory=VerbsConfig)

    @model_validator(mode="after")
    def _one_secret(self) -> Self:
        if self.secret is not None and self.secret_file is not None:
            raise ValueError("secret and secret_file are both set; remove one of them")
        return self

    def secret_bytes(self) -> bytes:
        """The shared secret, b"" when none is set. Raises ConfigError if it cannot be had."""
        if self.secret is not None:
            value, key = self.secret.get_secret_value().encode(), "secret"
        elif self.secret_file is not None:
            key = f"secret_file = {self.secret_file}"
            try:
                with self.secret_file.open("rb") as file:
                    value = file.read(2 * _SECRET_BYTES_MAX).rstrip()
            except OSError as error:
                raise ConfigError(f"{key}: {error.strerror}; name a readable file") from error
        else:
            return b""
        if not 1 <= len(value) <= _SECRET_BYTES_MAX:
            raise ConfigError(f"{key}: a secret has 1 to {_SECRET_BYTES_MAX} bytes")
        return value
