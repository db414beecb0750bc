"""The simulator keeps what its OpenAPI page promises, whatever it is asked."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
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

from hymcache.dra.fabric.models import API_ROOT
from hymcache.dra.simulator.app import make_simulator_app
from hymcache.dra.simulator.hardware import (
    Credentials,
    Fabric,
    SimulatedAppliance,
    SimulatedHost,
    make_blade,
)
from hymcache.dra.simulator.host_agents import NO_AGENT
from hymcache.dra.simulator.service import Dialect, FabricService

HOSTS = ("node-1", "node-2")
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
    negative_data_rejection,
    unsupported_method,
]


def new_app(dialect: Dialect = Dialect.PAPER) -> Any:
    credentials = Credentials(
        username="u", password="p", ip_address="127.0.0.1", port=1, backend=NO_AGENT
    )
    blade = make_blade(
        "blade-0",
        credentials,
        base_mib=0,
        block_mib=64,
        channels=8,
        blocks_a_channel=4,
        hosts=HOSTS,
    )
    appliance = SimulatedAppliance(
        id="appliance-0", credentials=credentials, blades={"blade-0": blade}
    )
    fabric = Fabric(
        appliances={"appliance-0": appliance},
        hosts={host: SimulatedHost(id=host, credentials=credentials) for host in HOSTS},
    )
    return make_simulator_app(FabricService(fabric, dialect=dialect))


def new_schema(dialect: Dialect = Dialect.PAPER) -> schemathesis.BaseSchema:
    return schemathesis.openapi.from_asgi("/openapi.json", new_app(dialect))


# Faults that are asked for would be failures of whatever comes next.
schema = new_schema().exclude(tag="faults")
public_schema = new_schema(Dialect.PUBLIC).exclude(tag="faults")
fault_schema = new_schema().include(tag="faults")


@pytest.mark.slow
@schema.parametrize()
@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
def test_every_operation_answers_as_documented(case: schemathesis.Case[Any]) -> None:
    case.call_and_validate(checks=CHECKS)


@pytest.mark.slow
@public_schema.parametrize()
@settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck))
def test_the_public_dialect_answers_as_documented(case: schemathesis.Case[Any]) -> None:
    case.call_and_validate(checks=CHECKS)


@fault_schema.parametrize()
@settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck))
def test_asking_for_faults_is_answered_as_documented(case: schemathesis.Case[Any]) -> None:
    case.call_and_validate(checks=CHECKS)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_sequences_of_operations_answer_as_documented() -> None:
    schema = new_schema().exclude(tag="faults")

    class Machine(schema.as_state_machine()):  # type: ignore[misc]
        def validate_response(
            self, response: schemathesis.Response, case: schemathesis.Case[Any], **_more: Any
        ) -> None:
            case.validate_response(response, checks=CHECKS)

    Machine.run(
        settings=settings(
            max_examples=40,
            stateful_step_count=10,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        )
    )


def test_the_page_of_the_api_works() -> None:
    async def pages() -> tuple[httpx.Response, httpx.Response]:
        transport = httpx.ASGITransport(new_app())
        async with httpx.AsyncClient(transport=transport, base_url="http://simulator") as client:
            return await client.get("/docs"), await client.get("/openapi.json")

    page, api = asyncio.run(pages())
    assert page.status_code == 200
    assert "/openapi.json" in page.text
    paths = api.json()["paths"]
    documented = {
        (path.removeprefix(API_ROOT), method.upper())
        for path, operations in paths.items()
        for method in operations
        if path.startswith(API_ROOT)
    }
    appliance = "/appliances/{applianceId}"
    blade = appliance + "/blades/{bladeId}"
    host = "/hosts/{hostId}"
    crud = ("GET", "PUT", "PATCH", "DELETE")
    assert documented == {
        ("", "GET"),
        *((path, method) for path in ("/appliances", "/hosts") for method in ("GET", "POST")),
        *((appliance + "/blades", method) for method in ("GET", "POST")),
        *((path, method) for path in (appliance, blade, host) for method in crud),
        *((f"{blade}/{part}", "GET") for part in ("resources", "ports")),
        (blade + "/resources/{resourceId}", "GET"),
        (blade + "/ports/{portId}", "GET"),
        *((blade + "/memory", method) for method in ("GET", "POST", "PUT")),
        *((blade + "/memory/{memoryId}", method) for method in ("GET", "PATCH", "DELETE")),
        *((f"{host}/{part}", "GET") for part in ("ports", "memory-devices")),
        *((f"{host}/{part}/{{portId}}", "GET") for part in ("ports", "memory-devices")),
        *((host + "/memory", method) for method in ("GET", "POST")),
        *((host + "/memory/{memoryId}", method) for method in ("GET", "DELETE")),
    }
