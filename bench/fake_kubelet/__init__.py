"""A kubelet and a container runtime as DRA plugins meet them: their calls, deadlines and demands.

For tests and benchmarks of the plugin. The kubelet's behaviour is that of Kubernetes 1.36.
"""

from __future__ import annotations

from hymcache.bench.fake_kubelet.container_edits import ContainerEdits, resolve_cdi
from hymcache.bench.fake_kubelet.kubelet import FakeKubelet, HealthState, PrepareFailed

__all__ = ["ContainerEdits", "FakeKubelet", "HealthState", "PrepareFailed", "resolve_cdi"]
