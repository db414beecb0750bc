"""The agent keeps what its OpenAPI page promises, whatever it is asked."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
    unsupported_method,
)

from hymcache.dra.host_agent import app, resources
from hymcache.dra.host_agent.allocations import HostAllocations, HostState
from hymcache.dra.host_agent.file_backend import FileBackend
from hymcache.dra.host_agent.sessions import Credentials, Sessions
from hymcache.dra.state_file import StateFile

_CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
    negative_data_rejection,
    unsupported_method,
]
# The folder goes with the process.
_FOLDER = tempfile.TemporaryDirectory(prefix="host-agent-")
_SESSIONS = Sessions(Credentials("user", "password"))


def _new_app() -> Any:
    folder = Path(_FOLDER.name)
    allocations = HostAllocations(
        FileBackend(folder / "memory", "host-1"),
        StateFile(folder / "state.json", HostState),
        folder / "cdi",
    )
    return app.make_agent_app(allocations, _SESSIONS)


schema = schemathesis.openapi.from_asgi("/openapi.json", _new_app())


@pytest.mark.slow
@schema.parametrize()
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
def test_every_operation_answers_as_documented(case: schemathesis.Case[Any]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(app, "_WRONG_PASSWORD_S", 0.0)
        begun = _SESSIONS.begin("user", "password")
        assert begun is not None
        case.call_and_validate(headers={resources.TOKEN_HEADER: begun[1]}, checks=_CHECKS)
