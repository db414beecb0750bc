"""The numbers that the design rests on, each with its source.

"HyMCache" is arXiv 2607.18141 (a remote KV-cache tier on CXL-hybrid memory). A number without a
paper is this project's own and says why it is what it is. Bounds that only the C++ core uses
stand beside the code there.
"""

from __future__ import annotations

from typing import Final

KIB: Final = 1 << 10
MIB: Final = 1 << 20
GIB: Final = 1 << 30
TIB: Final = 1 << 40

# HyMCache, "Lookup": the metadata of at most 32 KV objects is asked for in one request.
LOOKUP_KEYS_MAX: Final = 32

# HyMCache, "Master": 64 B of metadata an object, so that 10 TB in 16 MB blocks (6.5e5 objects)
# need about 40 MB. The layout is hymcache/csrc/entry.h.
ENTRY_BYTES: Final = 64

# HyMCache, "KV Connector": the host-side staging buffer of an engine, 5 GB by default.
STAGING_BUFFER_BYTES: Final = 5 * GIB

# HyMCache, "KV Connector": after 10 s without the remote KV the engine recomputes.
LOAD_DEADLINE_S: Final = 10.0

# HyMCache, evaluation: the block size of vLLM in tokens, and what one block weighs.
BLOCK_TOKENS: Final = 128
BLOCK_BYTES_LLAMA_8B: Final = 16 * MIB

# A node is listed for this long after its last heartbeat. Three heartbeats fit, so a lost one
# or a pause of the scheduler does not unlist it.
LEASE_MS: Final = 3_000

# How long a client waits for a connection. A live host answers within milliseconds; a dead one
# must not cost a request a noticeable part of LOAD_DEADLINE_S.
CONNECT_TIMEOUT_S: Final = 2.0

# 1,000 engines with a connection for each of 4 workers.
CONNECTIONS_MAX: Final = 4_096

# One object travels in one frame and its length in 32 bits; no known block comes near.
OBJECT_BYTES_MAX: Final = GIB
