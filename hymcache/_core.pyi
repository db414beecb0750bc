"""The C++ core. Errors are those of hymcache.errors; long calls release the GIL."""

from collections.abc import Sequence

from typing_extensions import Buffer

# ---- bench: what ours is measured against ------------------------------------------------------

class ReferenceCopy:
    """Batches of up to 32 blocks of one size to and from a server process, as plain as can be."""

    def get(self, offsets: Sequence[int], into: Sequence[Buffer]) -> None:
        """Fills each buffer with the server's bytes at its offset."""

    def put(self, offsets: Sequence[int], buffers: Sequence[Buffer]) -> None:
        """Writes each buffer to the server's memory at its offset."""

class SharedMemoryCopy(ReferenceCopy):
    """memcpy through a memfd; the server answers a byte. Takes both descriptors over."""

    def __init__(self, socket: int, memory: int, memory_bytes: int) -> None: ...

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
