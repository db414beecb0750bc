"""KV shared through memory that several hosts map (arXiv 2609.10790): no service in between.

`SharedRegionOffloadingSpec` is for vLLM's OffloadingConnector, `SharedRegionTier` the same memory
below the CPU tier of its TieringOffloadingSpec. docs/shared-region.md says how to set them up.

    scheduler                                  worker
    SharedRegionManager                        SharedRegionWorker
      Directory: plain loads, no data            Transfers: copies, crc32c
             \\                                     /
              +------- one region, mapped --------+------- other engines, other hosts
"""

from __future__ import annotations

from hymcache.connector.shared_region.spec import SharedRegionOffloadingSpec
from hymcache.connector.shared_region.tier import SharedRegionTier

__all__ = ["SharedRegionOffloadingSpec", "SharedRegionTier"]
