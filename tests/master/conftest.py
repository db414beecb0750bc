"""A master in this process, on ports that the system chooses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from hymcache.config_source import load_config
from hymcache.master import MasterService

StartMaster = Callable[..., MasterService]


@pytest.fixture
def start_master() -> Iterator[StartMaster]:
    """Starts a master with these settings of the configuration; stops it in the end."""
    with ExitStack() as stack:

        def start(*settings: str) -> MasterService:
            ports = ("master.listen=127.0.0.1:0", "master.grpc=", "master.http=")
            config = load_config(environ={}, settings=(*ports, *settings))
            return stack.enter_context(MasterService(config))

        yield start
