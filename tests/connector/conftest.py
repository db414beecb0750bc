"""What the tests of the connector share."""

from __future__ import annotations

import importlib.util
import os
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.connector.reference_tokens import ReferenceTokens

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


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with random weights."""
    from hymcache.bench.tiny_model import TINY, make_model

    return make_model(TINY, tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session")
def hybrid_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another, with two KV cache groups; made once, for vLLM patches the class that makes it."""
    from tests.connector.hybrid_model import make_hybrid_model

    return make_hybrid_model(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session")
def reference(model: Path) -> ReferenceTokens:
    """What an engine without a connector generates."""
    from tests.connector.reference_tokens import ReferenceTokens

    return ReferenceTokens(model)
