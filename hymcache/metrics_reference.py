"""Writes docs/metrics.md from the tables of the rooms (`make docs`)."""

from __future__ import annotations

import importlib
import sys
from typing import Final

from hymcache.metric_table import table_markdown

# Rooms that serve /metrics, each with a module that declares METRICS.
_TABLES: Final = {
    "Master": "hymcache.master.metrics",
    "Storage node": "hymcache.kv_manager.metrics",
    "Kubernetes: controller": "hymcache.dra.controller.metrics",
    "Kubernetes: host agent": "hymcache.dra.host_agent.metrics",
    "Kubernetes: kubelet plugin": "hymcache.dra.kubelet_plugin.metrics",
}

_INTRODUCTION: Final = """\
# Metrics

What `/metrics` of a service has, for Prometheus. The address is `http` of the service's section
in the configuration. Beside these there are `hymcache_build_info` with the label `version`, and the
standard `process_*` metrics: memory, CPU time and descriptors of the process.

What engines say of the connector is in vLLM's own `/metrics`: [vllm.md](vllm.md) has the table.
"""


def metrics_markdown() -> str:
    """All tables."""
    parts = [_INTRODUCTION]
    for title, module_name in _TABLES.items():
        table = importlib.import_module(module_name).METRICS
        parts.append(f"## {title}\n\n{table_markdown(table)}")
    return "\n".join(parts)


if __name__ == "__main__":
    sys.stdout.write(metrics_markdown())
