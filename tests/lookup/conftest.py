"""Services for the tests of the client: in this process, or in processes that can be killed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.lookup.service_process import ServiceProcess
from tests.lookup.small_service import SmallService

StartProcess = Callable[..., ServiceProcess]


@pytest.fixture
def service(tmp_path: Path) -> Iterator[SmallService]:
    """A master and a node in this process."""
    with SmallService(tmp_path) as running:
        yield running


@pytest.fixture
def start_process(tmp_path: Path) -> Iterator[StartProcess]:
    """Starts `hymcache COMMAND --set ...`; what still runs in the end is killed."""
    with ExitStack() as stack:

        def start(command: str, *settings: str) -> ServiceProcess:
            return stack.enter_context(ServiceProcess(tmp_path, command, settings))

        yield start
