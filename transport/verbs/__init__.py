"""RDMA by verbs: READs and WRITEs of a node's memory that cost neither side's CPU a copy.

    client                                        node
    Initiator -- Adapter (a port, a PD)           Adapter -- Acceptor
       Link = Connection (QP + CQ)  <--- RC --->  Connection, one for each peer
              bounce memory                       regions or windows of the node's memory

The ends find each other over the wire protocol's connection (docs/wire-protocol.md, section 10),
which also carries everything but the bytes. `library.py` says what is asked of a verbs library,
`pyverbs_library.py` is the one there is. docs/rdma.md is the user's page.
"""

from __future__ import annotations

from hymcache.transport.verbs.acceptor import Acceptor
from hymcache.transport.verbs.choice import has_devices, make_acceptor, make_initiator
from hymcache.transport.verbs.initiator import Initiator, Link
from hymcache.transport.verbs.library import GidType, VerbsLibrary
from hymcache.transport.verbs.ports import (
    PortReport,
    Survey,
    choose_gid,
    choose_port,
    gid_text,
    survey_ports,
)
from hymcache.transport.verbs.pyverbs_library import load_library
from hymcache.transport.verbs.registration import (
    ignores_lock_limit,
    locked_bytes,
    memory_lock_limits,
)

__all__ = [
    "Acceptor",
    "GidType",
    "Initiator",
    "Link",
    "PortReport",
    "Survey",
    "VerbsLibrary",
    "choose_gid",
    "choose_port",
    "gid_text",
    "has_devices",
    "ignores_lock_limit",
    "load_library",
    "locked_bytes",
    "make_acceptor",
    "make_initiator",
    "memory_lock_limits",
    "survey_ports",
]
