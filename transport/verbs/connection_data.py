"""What the two ends of a queue pair tell each other: LinkEndpoint of docs/wire-protocol.md."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final, Self

from hymcache.errors import ProtocolError
from hymcache.transport.verbs.library import PACKET_NUMBER_BITS, GidType, LinkLayer, Mtu

_LAYOUT: Final = struct.Struct("<16sIIHBBBBBx")
BYTES: Final = _LAYOUT.size


@dataclass(frozen=True, slots=True)
class ConnectionData:
    """One end."""

    gid: bytes
    queue_pair: int
    first_packet: int
    lid: int
    link_layer: LinkLayer
    gid_type: GidType
    mtu: Mtu
    reads_out: int
    reads_in: int

    def pack(self) -> bytes:
        """As it goes over the wire."""
        return _LAYOUT.pack(
            self.gid,
            self.queue_pair,
            self.first_packet,
            self.lid,
            self.link_layer,
            self.gid_type,
            self.mtu,
            self.reads_out,
            self.reads_in,
        )

    @classmethod
    def unpack(cls, raw: bytes) -> Self:
        """Raises ProtocolError where a field has no meaning."""
        if len(raw) != BYTES:
            raise ProtocolError(f"an RDMA endpoint has {BYTES} bytes, not {len(raw)}")
        gid, number, packet, lid, layer, kind, mtu, reads_out, reads_in = _LAYOUT.unpack(raw)
        try:
            data = cls(
                gid,
                number,
                packet,
                lid,
                LinkLayer(layer),
                GidType(kind),
                Mtu(mtu),
                reads_out,
                reads_in,
            )
        except ValueError as error:
            raise ProtocolError(f"an RDMA endpoint that cannot be: {error}") from error
        if number == 0 or (number | packet) >> PACKET_NUMBER_BITS:
            raise ProtocolError("an RDMA endpoint whose numbers have more than 24 bits, or are 0")
        return data
