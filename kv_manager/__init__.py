"""The storage node: prefetch sessions in windows, read tokens, admission of writes.

The node itself is C++ on one event loop (storage_node.h); `NodeService` makes one from the
configuration and gives it the HTTP side.
"""

from __future__ import annotations

from hymcache.kv_manager.node_service import NodeService, node_id

__all__ = ["NodeService", "node_id"]
