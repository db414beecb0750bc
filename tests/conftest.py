"""What tests of all rooms share."""

from __future__ import annotations

import pytest

pytest_plugins = ["tests.testbed.fixtures"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # Warnings are errors, but those of vLLM and of what it imports are not ours to mend.
    for item in items:
        if item.get_closest_marker("vllm"):
            item.add_marker(pytest.mark.filterwarnings("default"))
