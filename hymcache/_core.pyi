"""The C++ core. Errors are those of hymcache.errors; long calls release the GIL."""

from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Any, Literal, TypedDict

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Buffer

from hymcache.transport.verbs import Acceptor, Initiator

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
        warn: Callable[[str], None],
        device: FileDeviceOptions,
        protocol_version_max: int = ...,
        verbs: Acceptor | None = None,
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
        verbs: Initiator | None = None,
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

    def register_memory(self, address: int, size_bytes: int) -> None:
        """Lets RDMA reach memory that stays until the client is gone; nothing without RDMA.
        Raises ConfigError or DeviceError."""

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

# ---- chm_device, lookup: the shared region ---------------------------------------------------

class RegionStatus(IntEnum):
    """What became of one key in a shared region. None of these is an error."""

    OK = 0
    MISS = 1
    CORRUPT = 2
    """The bytes do not match their crc32c; the object was dropped."""

    PENDING = 3
    """Somebody is storing it (or, once in 4096 times, a key like it)."""

    STORED_ALREADY = 4
    FULL = 5
    """Every slot where the key may go is pinned or being written."""

    WRONG_SIZE = 6
    """Longer than a slot (store), or not as long as the segments (load)."""

    LOST = 7
    """The slot was taken away during the store: this writer was held dead for its lease."""

class RegionGeometry(TypedDict):
    """What the headers of a region say; see docs/region-format.md. Sizes in bytes."""

    version: int
    region_bytes: int
    slot_bytes: int
    slots: int
    data_offset: int
    participants: int
    pins: int
    lease_ms: int
    probe_slots: int
    claim: int

class RegionParticipant(TypedDict):
    """A process that is attached; `silent_ms` since its heart was last seen to beat."""

    index: int
    epoch: int
    name: str
    state: Literal["free", "active", "dead"]
    beats: int
    silent_ms: int
    pins: int

class RegionEntry(TypedDict):
    """One slot that is in use."""

    slot: int
    state: Literal["writing", "valid", "dying"]
    key: bytes
    name_space: int
    length: int
    crc32c: int | None
    generation: int
    referenced: bool
    writer: int
    stored_at_ms: int

class RegionSlots(TypedDict):
    """How many slots are in which state."""

    free: int
    writing: int
    valid: int
    dying: int

class RegionUsage(RegionSlots):
    """What all slots hold, counted by walking them and their entries."""

    pinned: int
    stored_bytes: int
    namespaces: list[tuple[int, int, int]]
    """Fingerprint, objects, bytes; the largest first, at most 32."""

class SharedRegion:
    """A mapped region: a device-dax, a file, or a memfd by its path in /proc.

    A region that is blank is formatted by the first that opens it with a `slot_bytes`; the others
    attach. Raises ConfigError where it is not ours, does not fit or has another version,
    Unavailable where the one that formats it does not come to an end within `wait_s`, DeviceError.
    """

    def __init__(
        self,
        path: str,
        *,
        offset: int = 0,
        size_bytes: int = 0,
        slot_bytes: int = 0,
        config: str = "",
        participants: int = 256,
        pins: int = 1016,
        lease_ms: int = 10_000,
        map_data: bool = True,
        writable: bool = True,
        prefault: bool = False,
        durable: bool = False,
        force: bool = False,
        wait_s: float = 10.0,
    ) -> None: ...
    @property
    def formatted_here(self) -> bool: ...
    @property
    def kind(self) -> Literal["dax", "file", "memory"]: ...
    @property
    def config(self) -> str:
        """The configuration JSON of whoever formatted it."""

    @property
    def geometry(self) -> RegionGeometry: ...
    def prefault(self) -> int:
        """Touches every page that is mapped, so that no later access pays for it; the bytes.

        Raises DeviceError where a page is not to be had: the file system or memory is full.
        """

class RegionDirectory:
    """The objects of a region. Thread-safe; no call waits for another process.

    Joins the table of participants (unless the region is read-only), beats in a thread of its own,
    and reclaims what others that died have left. Keys are 16 bytes each, one after another;
    `addresses` is an array of one row a key and one column a segment, `sizes` their bytes, of one
    row for all keys or one a key. Memory must stay where it is during the call.
    """

    def __init__(
        self,
        region: SharedRegion,
        *,
        name: str = "",
        verify_checksums: bool = True,
        threads: int = 1,
        high_watermark: float = 0.98,
        low_watermark: float = 0.95,
        maintain: bool = True,
    ) -> None:
        """Raises Unavailable when all places for participants are taken."""

    @property
    def participant(self) -> int:
        """-1 where the region is read-only."""

    def lookup(self, keys: bytes) -> bytes:
        """A RegionStatus a key: OK, PENDING or MISS. Plain loads; touches no data slot."""

    def touch(self, keys: bytes) -> None:
        """Marks the objects as used, for CLOCK."""

    def store(
        self,
        keys: bytes,
        addresses: NDArray[np.uint64],
        sizes: NDArray[np.uint64],
        name_space: int = 0,
    ) -> bytes:
        """A RegionStatus a key: OK, STORED_ALREADY, PENDING, FULL, WRONG_SIZE or LOST."""

    def load(self, keys: bytes, addresses: NDArray[np.uint64], sizes: NDArray[np.uint64]) -> bytes:
        """A RegionStatus a key: OK, MISS, CORRUPT or WRONG_SIZE. What is not OK leaves its
        segments undefined."""

    def pin(self, keys: bytes) -> tuple[int, bytes]:
        """Keeps the objects from being evicted until `unpin` or the end of the lease of this
        process: a ticket, and OK or MISS a key (FULL: no pin was left)."""

    def unpin(self, ticket: int) -> None:
        """ConfigError for a ticket that is not known."""

    def remove(self, keys: bytes) -> bytes:
        """A RegionStatus a key: OK, MISS, or FULL where somebody has it pinned."""

    def clear(self) -> int:
        """Removes all objects that nobody has pinned; returns how many."""

    def reclaim(self) -> int:
        """Frees what dead participants have left; returns slots freed. `maintain` does it too."""

    def stats(self) -> dict[str, int]:
        """Counters of this object: docs/region-format.md, section "Counters"."""

    def slots_by_state(self) -> RegionSlots:
        """Counted from the slot words alone: a millisecond for some hundred thousand slots."""

    def usage(self) -> RegionUsage: ...
    def participants(self) -> list[RegionParticipant]: ...
    def entries(self, first: int, count: int) -> list[RegionEntry]:
        """Those of slots first, first + 1, ... first + count - 1 that are in use."""

    def verify(self, first: int, count: int) -> tuple[int, int, int]:
        """Checks the crc32c of those slots: (good, without crc32c, slots that are corrupt)."""

    def close(self) -> None:
        """Leaves; unpins all. Other calls raise Unavailable from then on."""

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
        """ "shm", "verbs", "tcp" or "" when no node was reached."""

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

def stream_copy(to: int, from_: int, bytes: int) -> None:  # noqa: A002 - as in the rest
    """Our streaming copy between two addresses, and nothing else."""

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
