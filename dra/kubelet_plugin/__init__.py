"""The plugin of a node's kubelet: gives pods the devices that their claims were attached to.

The controller has composed the region and had the host agent make its device and CDI spec; the
plugin only reads what is there (preparer.py), keeps what it told (checkpoint.py) and says when a
device in use is gone (device_health.py).
"""

from __future__ import annotations

from hymcache.dra.kubelet_plugin.claim_source import ClaimSource, ClusterClaims
from hymcache.dra.kubelet_plugin.plugin import KubeletPlugin, PluginOptions

__all__ = ["ClaimSource", "ClusterClaims", "KubeletPlugin", "PluginOptions"]
