"""The C++ core. Errors are those of hymcache.errors; long calls release the GIL."""

from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Any, Literal, TypedDict

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Buffer

# ---- transport ---------------------------------------------------------------------------------

def crc32c(data: Buffer, crc: int = 0) -> int:
    """The CRC-32C of contiguous `data`, appended to bytes whose checksum is `crc`."""

def copy_implementation() -> str:
    """How blocks are copied on this CPU: "avx512", "avx2", ..., "memcpy"."""

# ---- kv_manager: the storage node --------------------------------------------------------------

class FileDeviceOptions:
    """What an emulated device is made of; the keys of `[device]`, sizes in bytes."""

    def __init__(
        self,
        *,
        path: str,
        capacity_bytes: int,
        staging_bytes: int,
        write_buffer_bytes: int,
        io: str = "auto",
        io_depth: int = 16,
        preallocate: bool = True,
        segment_bytes: int = 0,
    ) -> None: ...

class StorageNode:
    """A node that serves when the constructor returns. ConfigError, DeviceError where it cannot."""

    def __init__(
        self,
        *,
        node: int,
        name: str,
        listen: str,
        advertise_host: str = "",
        unix_path: str = "",
        masters: Sequence[str] = (),
        connections_max: int = 4096,
        secret: bytes = b"",
        log: Callable[[str], None],
        device: FileDeviceOptions,
        protocol_version_max: int = ...,
    ) -> None: ...
    def endpoints(self) -> list[str]:
        """As bound: first TCP, then "unix:PATH" if there is one."""

    def device_description(self) -> str: ...
    def stats(self) -> dict[str, Any]: ...
    def set_draining(self, draining: bool) -> None: ...
    def stop(self) -> None:
        """Closes all connections; other calls raise Unavailable from then on."""

# ---- lookup: the client ------------------------------------------------------------------------

class BlockStatus(IntEnum):
    """What became of one block of a read or a write. None of these is an error."""

    OK = 0
    MISS = 1
    CORRUPT = 2
    UNAVAILABLE = 3
    DEADLINE = 4
    DEVICE_ERROR = 5
    STORED_ALREADY = 6
    SKIP_BUFFER_FULL = 7
    SKIP_DEVICE_FULL = 8
    SKIP_TOO_LARGE = 9
    SKIP_DRAINING = 10
    SKIP_PREFIX = 11
    CANCELLED = 12

class StoreClient:
    """Blocking calls with deadlines; thread-safe. Keys are 16 bytes each, one after another."""

    def __init__(
        self,
        *,
        masters: Sequence[str],
        transport: str = "auto",
        secret: bytes = b"",
        deadline_s: float = 10.0,
        connect_timeout_s: float = 1.0,
        verify_checksums: bool = True,
        name: str = "client",
    ) -> None: ...
    def lookup(self, keys: bytes) -> bytes:
        """A 64-byte Entry for each key, zeros for a miss. Raises Unavailable."""

    def get(self, keys: bytes, into: Sequence[Buffer]) -> bytes:
        """Fills buffers of exactly the objects' sizes; a BlockStatus a key. Raises Unavailable
        when no master answers."""

    def put(
        self,
        keys: bytes,
        buffers: Sequence[Buffer],
        name_space: int = 0,
        prefix_order: bool = False,
    ) -> bytes:
        """Writes each buffer as an object; a BlockStatus a key. In prefix order nothing is
        written after the first block that was not stored. Raises Unavailable when no master
        answers."""

    def stats(self) -> dict[str, Any]: ...
    def close(self) -> None:
        """Closes idle connections; other calls raise Unavailable from then on."""

class Match:
    """The answer to one lookup of a prefix."""

    @property
    def hits(self) -> int: ...
    @property
    def plan(self) -> bytes:
        """What TransferEngine.submit_load takes; empty without a hit."""

    @property
    def reason(self) -> str:
        """Why the lookup failed; empty when it did not."""

    @property
    def seconds(self) -> float: ...

class PrefixMatcher:
    """Looks prefixes up in a thread of its own and starts their prefetch with the first hit."""

    def __init__(self, client: StoreClient) -> None: ...
    def start(self, keys: bytes) -> int:
        """Never blocks. The ticket is kept until `take` or `cancel`."""

    def poll(self, ticket: int, timeout_s: float = 0.0) -> Match | None:
        """None as long as the answer is not there (after `timeout_s`). ConfigError for a ticket
        that is not known."""

    def take(self, ticket: int) -> None:
        """Forgets the ticket; the prefetch goes on for whoever has the plan."""

    def cancel(self, ticket: int) -> None:
        """Forgets the ticket and takes its prefetch back."""

# ---- connector: an engine's blocks -------------------------------------------------------------

class BlockLayout:
    """Block b is, for each i in order, the sizes[i] bytes at bases[i] + b * strides[i]."""

    def __init__(
        self,
        bases: Sequence[int],
        strides: Sequence[int],
        sizes: Sequence[int],
        num_blocks: int,
    ) -> None: ...
    @property
    def num_blocks(self) -> int: ...
    @property
    def block_bytes(self) -> int: ...

class TransferResult:
    """A job that has ended."""

    @property
    def job(self) -> int: ...
    @property
    def is_load(self) -> bool: ...
    @property
    def statuses(self) -> bytes:
        """A BlockStatus a block."""

    @property
    def bytes_moved(self) -> int: ...
    @property
    def seconds(self) -> float:
        """From submission to the end."""

    @property
    def transport(self) -> str:
        """ "shm", "tcp" or "" when no node was reached."""

class TransferEngine:
    """Moves blocks between the store and memory, in threads of its own."""

    def __init__(
        self,
        client: StoreClient,
        layouts: Sequence[BlockLayout],
        *,
        load_threads: int = 1,
        save_threads: int = 1,
    ) -> None: ...
    def submit_load(
        self,
        job: int,
        layout: int,
        plan: bytes,
        first: int,
        block_ids: NDArray[np.int64],
        deadline_s: float,
    ) -> None:
        """Rows first, first + 1, ... of the plan into these blocks."""

    def submit_save(
        self,
        job: int,
        layout: int,
        keys: bytes,
        name_space: int,
        block_ids: NDArray[np.int64],
        deadline_s: float,
    ) -> None:
        """These blocks under these keys, which are consecutive blocks of one prefix."""

    def poll(self) -> list[TransferResult]: ...
    def wait(self, jobs: Sequence[int], timeout_s: float) -> bool:
        """True when none of the jobs is queued or running: their blocks are left alone."""

    def cancel(self, jobs: Sequence[int]) -> None:
        """They end with CANCELLED for what is not done, at the next block."""

    def close(self) -> None: ...

# ---- bench: what ours is measured against ------------------------------------------------------

class ReferenceCopy:
    """Batches of up to 32 blocks of one size to and from a server process, as plain as can be."""

    def get(self, offsets: Sequence[int], into: Sequence[Buffer]) -> None:
        """Fills each buffer with the server's bytes at its offset."""

    def put(self, offsets: Sequence[int], buffers: Sequence[Buffer]) -> None:
        """Writes each buffer to the server's memory at its offset."""

class SharedMemoryCopy(ReferenceCopy):
    """memcpy, or our own copy (`streaming`), through a memfd; the server answers a byte.

    Takes both descriptors over.
    """

    def __init__(self, socket: int, memory: int, memory_bytes: int, streaming: bool) -> None: ...

class StreamCopy(ReferenceCopy):
    """A blocking TCP socket; connects to `serve_stream` on 127.0.0.1."""

    def __init__(self, port: int) -> None: ...

class EchoClient:
    """A request and a response of given sizes; connects to `serve_echo` on 127.0.0.1."""

    def __init__(self, port: int, request_bytes: int, response_bytes: int) -> None: ...
    def round_trip(self) -> None: ...

class IndexFiller:
    """Publishes objects that nobody holds to a master, as a storage node of its own."""

    def __init__(self, master: str, name: str, node: int) -> None: ...
    def publish(self, count: int) -> int:
        """Publishes `count` more objects; returns how many the master took."""

    def heartbeat(self) -> None: ...
    def last_keys(self, count: int) -> list[bytes]:
        """Keys of the objects published last, 16 bytes each."""

def reference_listen() -> tuple[int, int]:
    """A listening socket on 127.0.0.1 for the servers below: (descriptor, port)."""

def serve_shared_memory(socket: int, memory: int, memory_bytes: int) -> None:
    """Fills the memfd and answers until the client closes. Takes both descriptors over."""

def serve_stream(listener: int, memory_bytes: int) -> None:
    """Serves one `StreamCopy` from memory of its own. Takes the descriptor over."""

def serve_echo(listener: int, request_bytes: int, response_bytes: int) -> None:
    """Answers requests of one size with responses of one size until all clients are gone."""

def lookup_frame_bytes(keys: int) -> tuple[int, int]:
    """Bytes of a LOOKUP frame for that many keys, and of its response."""

# ---- master ------------------------------------------------------------------------------------

class MasterStats(TypedDict):
    """Counters since the start, and what there is now. Rows are those of the index."""

    lookups: int
    lookup_keys: int
    lookup_hits: int
    registrations: int
    registrations_refused: int
    leases_lapsed: int
    rows_published: int
    rows_refused: int
    rows_withdrawn: int
    rows_swept: int
    connections: int
    connections_accepted: int
    connections_refused: int
    protocol_errors: int
    frames: int
    nodes_alive: int
    nodes_lost: int
    rows: int
    rows_hidden: int
    rows_max: int
    index_bytes: int
    cpu_seconds: float
    namespaces: int
    largest_namespaces: list[tuple[int, int]]
    """Fingerprint and rows of at most 32, the largest first."""

class MemberInfo(TypedDict):
    """A node as the master knows it. `objects` and `sessions` are in the node's own words."""

    node: int
    name: str
    state: Literal["alive", "draining", "lost"]
    draining: bool
    connected: bool
    incarnation: int
    epoch: int
    tcp: str
    unix_path: str
    host: str
    capacity_bytes: int
    used_bytes: int
    objects: int
    sessions: int
    rows: int
    lease_left_ms: int
    state_age_ms: int

class FoundRow(TypedDict):
    """A row of the index. One that is not shown is not given to clients."""

    node: int
    node_name: str
    shown: bool
    address: int
    length: int
    generation: int
    name_space: int
    crc32c: int | None
    epoch: int

class MasterServer:
    """A master in a thread of its own.

    `listen` are `host:port` (0: any free port) or `unix:/path`; with a `secret`, peers must prove
    that they know it. Functions other than start() and stop() raise Unavailable when it does not
    run.
    """

    def __init__(
        self,
        listen: Sequence[str],
        *,
        name: str,
        lease_ms: int,
        connections_max: int,
        rows_max: int = ...,
        secret: bytes = b"",
    ) -> None: ...
    def start(self) -> None:
        """Serves, with an empty index. Raises ConfigError where it cannot listen."""

    def stop(self) -> None:
        """Ends all connections; idempotent."""

    def endpoints(self) -> list[str]:
        """Where it listens, with the ports that it got."""

    def incarnation(self) -> int: ...
    def stats(self) -> MasterStats: ...
    def members(self) -> list[MemberInfo]:
        """The nodes that are alive or lost, by name."""

    def wait_members(self, known: int, timeout_s: float) -> int:
        """Waits for a version of the members other than `known`; returns the present one."""

    def lookup(self, keys: Sequence[bytes]) -> list[list[FoundRow]]:
        """All rows of each of at most 32 keys of 16 bytes."""

    def drain(self, node: int, draining: bool) -> bool:
        """Tells a node to take no more writes, or to take them again. False: no such node."""

    def forget(self, node: int) -> bool:
        """Drops a node that is lost. False: no such node. Raises ConfigError if it is alive."""
