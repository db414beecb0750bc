"""What a job carries from the scheduler to the workers: names, no addresses.

A worker finds the slots itself, by key, when it copies. So nothing is held between the two, and a
slot that another host takes back in between is a load that fails, not a wrong byte.
"""

from __future__ import annotations

from dataclasses import dataclass

from vllm.v1.kv_offload.base import LoadStoreSpec


@dataclass(frozen=True, slots=True)
class RegionLoadStoreSpec(LoadStoreSpec):
    """Chunks by name, in the order of their blocks, and the request they are of.

    A name is the chunk's OffloadKey, after a change of weights with something in front of it.
    """

    req_id: str
    chunks: tuple[bytes, ...]
