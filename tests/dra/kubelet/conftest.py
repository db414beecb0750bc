"""A node with a plugin that the kubelet has registered."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.dra.kubelet.node import Node
from tests.dra.kubelet.plugin_process import DRIVER, PluginProcess


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    """Without a plugin yet."""
    with Node(tmp_path) as made:
        yield made


@pytest.fixture
def plugin(node: Node) -> PluginProcess:
    process = node.add_plugin()
    process.start()
    node.kubelet.wait_registered(DRIVER)
    return process
