"""Schemas of Kubernetes are megabytes each: read once, not once for each manifest."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import pytest
from kubernetes_validate import utils


@pytest.fixture(scope="session", autouse=True)
def read_schemas_once() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(utils, "schema_contents", functools.cache(utils.schema_contents))
        yield
