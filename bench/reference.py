"""Reference copies and the reference echo, each with a server process of its own."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from hymcache import _core
from hymcache.bench.child_process import ChildProcess

Transport = Literal["shm", "tcp", "verbs"]
ReferenceKind = Literal["shm", "shm_streaming", "tcp"]

# More than any CPU cache, so that every copy goes to memory, as a KV block does.
REFERENCE_MEMORY_BYTES: Final = 256 << 20


@dataclass(frozen=True)
class RunningReference:
    """A client, connected, and the process that serves it."""

    copy: _core.ReferenceCopy
    server_pid: int


@dataclass(frozen=True)
class RunningEcho:
    """A client, connected, and the process that serves it."""

    client: _core.EchoClient
    server_pid: int


def _server(arguments: list[object], pass_fds: list[int], log_dir: Path) -> ChildProcess:
    kind = str(arguments[0])
    return ChildProcess(
        f"{kind} reference",
        [sys.executable, "-P", "-m", "hymcache.bench.reference_server", *map(str, arguments)],
        log_dir / f"reference-{kind}.log",
        pass_fds=pass_fds,
    )


@contextmanager
def running_reference(kind: ReferenceKind, log_dir: Path) -> Iterator[RunningReference]:
    """Starts the server of a reference copy and connects to it.

    shm is memcpy through shared memory, shm_streaming our own copy through it, tcp a socket loop.
    """
    started = (
        _stream(log_dir) if kind == "tcp" else _shared_memory(log_dir, kind == "shm_streaming")
    )
    with started as reference:
        yield reference


@contextmanager
def _shared_memory(log_dir: Path, streaming: bool) -> Iterator[RunningReference]:
    size = REFERENCE_MEMORY_BYTES
    memory = os.memfd_create("hymcache-reference")
    try:
        os.ftruncate(memory, size)
        mine, theirs = socket.socketpair()
        with mine, theirs:
            arguments: list[object] = ["shm", theirs.fileno(), memory, size]
            server = _server(arguments, [theirs.fileno(), memory], log_dir)
            theirs.close()
            with server:
                copy = _core.SharedMemoryCopy(mine.detach(), os.dup(memory), size, streaming)
                yield RunningReference(copy, server.pid)
    finally:
        os.close(memory)


@contextmanager
def _stream(log_dir: Path) -> Iterator[RunningReference]:
    listener, port = _core.reference_listen()
    try:
        server = _server(["tcp", listener, REFERENCE_MEMORY_BYTES], [listener], log_dir)
    finally:
        os.close(listener)
    with server:
        yield RunningReference(_core.StreamCopy(port), server.pid)


@contextmanager
def running_echo(request_bytes: int, response_bytes: int, log_dir: Path) -> Iterator[RunningEcho]:
    """Starts an echo server for frames of these sizes and connects to it."""
    listener, port = _core.reference_listen()
    try:
        arguments: list[object] = ["echo", listener, request_bytes, response_bytes]
        server = _server(arguments, [listener], log_dir)
    finally:
        os.close(listener)
    with server:
        yield RunningEcho(_core.EchoClient(port, request_bytes, response_bytes), server.pid)
