"""What the tests of the connector share."""

from __future__ import annotations

import importlib.util
import os
import warnings

import pytest

# Before vLLM is imported anywhere: no telemetry, nothing from the network, and engines that run
# inside the test's process.
os.environ |= {
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
}

if importlib.util.find_spec("vllm"):
    with warnings.catch_warnings():
        # Warnings are errors here, and vLLM and torch warn of themselves when they load.
        warnings.simplefilter("ignore")
        import vllm.v1.core.sched.scheduler  # noqa: F401  # to have it loaded

# Those of vLLM, torch and the like while they run are not this project's; its own stay errors.
_OTHERS_WARNINGS = pytest.mark.filterwarnings(r"ignore:::(?!hymcache|tests)")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("vllm"):
            item.add_marker(_OTHERS_WARNINGS)
