"""The expressions in the chart, evaluated by a CEL of Google's as the API server's is."""

from __future__ import annotations

from typing import Any

import pytest
from cel_expr_python import cel

from hymcache.dra import names
from tests.dra.chart.rendering import Manifest, named, of_kind, rendered

CONTROLLER = "system:serviceaccount:hymcache:cxl-hymcache-dra-controller"
USER = "alice@example.com"


def evaluate(expression: str, **variables: Any) -> Any:
    """The value of an expression whose variables are dynamic, as those of the API server are."""
    environment = cel.NewEnv(variables=dict.fromkeys(variables, cel.Type.DYN))
    return environment.compile(expression).eval(data=variables).plain_value()


def selects(manifests: list[Manifest], device: dict[str, Any]) -> bool:
    (device_class,) = of_kind(manifests, "DeviceClass")
    (selector,) = device_class["spec"]["selectors"]
    return bool(evaluate(selector["cel"]["expression"], device=device))


def device(driver: str) -> dict[str, Any]:
    """As CEL sees a blade's device."""
    return {
        "driver": driver,
        "attributes": {driver: {"applianceId": "appliance-0", "bladeId": "blade-0"}},
        "capacity": {driver: {names.CAPACITY: 65536}},
        "allowMultipleAllocations": True,
    }


@pytest.mark.parametrize(
    ("case", "driver", "selected"),
    [
        ("least", names.DRIVER_NAME, True),
        ("least", "gpu.example.com", False),
        ("everything", "cxl.example.com", True),
        ("everything", names.DRIVER_NAME, False),
    ],
)
def test_the_device_class_selects_the_drivers_devices(
    case: str, driver: str, selected: bool
) -> None:
    assert selects(rendered(case), device(driver)) is selected


def admitted(
    policy: Manifest, user: str, after: dict[str, Any], before: dict[str, Any] | None
) -> bool:
    """Whether a policy lets a user make this of that."""
    known: dict[str, Any] = {
        "request": {"userInfo": {"username": user}},
        "object": after,
        "oldObject": before,
    }
    spec = policy["spec"]
    for condition in spec["matchConditions"]:
        if not evaluate(condition["expression"], **known):
            return True
    variables: dict[str, Any] = {}
    for variable in spec.get("variables", ()):
        value = evaluate(variable["expression"], **known, variables=dict(variables))
        variables[variable["name"]] = value
    return all(
        evaluate(validation["expression"], **known, variables=variables)
        for validation in spec["validations"]
    )


def resource_slice(driver: str) -> dict[str, Any]:
    return {"spec": {"driver": driver, "devices": []}}


@pytest.mark.parametrize(
    ("user", "driver", "allowed"),
    [
        (CONTROLLER, names.DRIVER_NAME, True),
        (USER, names.DRIVER_NAME, False),
        ("system:node:node-1", names.DRIVER_NAME, False),
        (CONTROLLER.replace("controller", "kubeletplugin"), names.DRIVER_NAME, False),
        (USER, "gpu.example.com", True),
    ],
)
def test_only_the_controller_writes_the_drivers_slices(
    user: str, driver: str, allowed: bool
) -> None:
    policy = named(rendered("least"), "ValidatingAdmissionPolicy", "-slices")
    assert admitted(policy, user, resource_slice(driver), None) is allowed
    before = resource_slice(driver)
    assert admitted(policy, user, resource_slice(driver), before) is allowed


def claim(**annotations: str) -> dict[str, Any]:
    named_ = {names.ANNOTATION_PREFIX + key: value for key, value in annotations.items()}
    return {"metadata": {"annotations": named_} if named_ else {}}


@pytest.mark.parametrize(
    ("user", "after", "before", "allowed"),
    [
        (USER, claim(), None, True),
        (USER, {"metadata": {"annotations": {"own": "1"}}}, None, True),
        (USER, claim(qos="4"), claim(), True),
        (USER, claim(teardown="forged"), None, False),
        # Another driver, the paper's say, takes claims by their owner.
        (USER, claim(owner="other-driver"), claim(), True),
        (USER, claim(teardown="forged"), claim(teardown="true"), False),
        (USER, claim(), claim(teardown="true"), False),
        (USER, claim(teardown="true", qos="8"), claim(teardown="true"), True),
        (CONTROLLER, claim(teardown="true"), claim(), True),
        (CONTROLLER, claim(), claim(owner="driver", teardown="true"), True),
    ],
)
def test_only_the_controller_says_what_is_freed_with_a_claim(
    user: str, after: dict[str, Any], before: dict[str, Any] | None, allowed: bool
) -> None:
    policy = named(rendered("least"), "ValidatingAdmissionPolicy", "-claims")
    assert admitted(policy, user, after, before) is allowed


def test_the_annotation_is_the_one_that_the_controller_sets() -> None:
    policy = named(rendered("least"), "ValidatingAdmissionPolicy", "-claims")
    (mark,) = [v for v in policy["spec"]["variables"] if v["name"] == "mark"]
    assert evaluate(mark["expression"]) == names.ANNOTATION_TEARDOWN


def test_every_policy_is_bound() -> None:
    manifests = rendered("everything")
    policies = {p["metadata"]["name"] for p in of_kind(manifests, "ValidatingAdmissionPolicy")}
    bindings = of_kind(manifests, "ValidatingAdmissionPolicyBinding")
    assert {binding["spec"]["policyName"] for binding in bindings} == policies
    assert all(binding["spec"]["validationActions"] == ["Deny"] for binding in bindings)
