"""Where the API server listens: it can go away and come back at the same port."""

from __future__ import annotations

import asyncio


class OutageListener:
    """Passes TCP connections on to a port, and can refuse them all for a while.

    It stands before the API server, so that an outage is what clients of a dead server see:
    connections reset, new ones refused.
    """

    def __init__(self, target_port: int) -> None:
        self._target_port = target_port
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self.port = 0

    async def start(self) -> None:
        """Listens, at the same port as before."""
        self._server = await asyncio.start_server(
            self._serve, "127.0.0.1", self.port, reuse_address=True, backlog=1024
        )
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Refuses connections and resets those that are open."""
        if self._server is not None:
            self._server.close()
            self._server = None
        self.reset()
        await asyncio.sleep(0)

    def reset(self) -> None:
        """Resets the connections that are open; new ones are taken."""
        for writer in list(self._writers):
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            ahead_reader, ahead_writer = await asyncio.open_connection(
                "127.0.0.1", self._target_port
            )
        except OSError:
            self._writers.discard(writer)
            writer.transport.abort()
            return
        tasks = [
            asyncio.ensure_future(_pump(reader, ahead_writer)),
            asyncio.ensure_future(_pump(ahead_reader, writer)),
        ]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._writers.discard(writer)
            for task in tasks:
                task.cancel()
            writer.transport.abort()
            ahead_writer.transport.abort()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    except ConnectionError:
        return
