"""A Kubernetes control plane in one small process, as far as DRA drivers meet it.

A real HTTP server that the official client talks to: versions and conflicts, finalizers, status
subresource, server-side apply with field managers, watches with bookmarks and 410, fields that are
dropped where a feature gate is off; a scheduler that allocates claims and waits for binding
conditions; and the controllers that give claims up when their last pod ends. What it does was
recorded on Kubernetes 1.36. Measurements and tests use it where no cluster is at hand; it is no
replacement for one.
"""

from __future__ import annotations
