"""The chart and the examples are what Kubernetes 1.34 to 1.37 take."""

from __future__ import annotations

import re
from typing import Any

import kubernetes_validate
import pytest
import typer
import yaml
from helm_python.chart import lint
from helm_python.errors import HelmError, HelmRenderError, HelmValuesError

from hymcache.dra import names
from hymcache.dra.cli import app
from hymcache.version import __version__
from tests.dra.chart.rendering import (
    CASES,
    CHART,
    EXAMPLES,
    LEAST,
    OUTER_AGENTS,
    SIMULATED,
    Values,
    containers,
    example_manifests,
    named,
    of_kind,
    render,
    rendered,
    with_values,
    workloads,
)

VERSIONS = ("1.34", "1.35", "1.36", "1.37")
# DeviceTaintRule is v1alpha3 before 1.36: the example says so.
TAINT_RULE = "DeviceTaintRule"


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("case", CASES)
def test_every_manifest_is_valid(case: str, version: str) -> None:
    manifests = rendered(case)
    assert manifests
    for manifest in manifests:
        assert kubernetes_validate.validate(manifest, version, strict=True) == version


@pytest.mark.parametrize("version", VERSIONS)
def test_every_example_is_valid(version: str) -> None:
    seen = set()
    for _, manifest in example_manifests():
        if manifest["kind"] == TAINT_RULE and version in {"1.34", "1.35"}:
            with pytest.raises(kubernetes_validate.SchemaNotFoundError):
                kubernetes_validate.validate(manifest, version, strict=True)
            manifest["apiVersion"] = "resource.k8s.io/v1alpha3"
        assert kubernetes_validate.validate(manifest, version, strict=True) == version
        seen.add(manifest["kind"])
    assert {"ResourceClaim", "StatefulSet", "Deployment", "Pod", TAINT_RULE} <= seen


def test_every_example_has_a_readme() -> None:
    folders = sorted(path.name for path in EXAMPLES.iterdir())
    assert folders == ["drain-blade", "extended-resource", "shared-region", "vllm-replicas"]
    for folder in folders:
        text = (EXAMPLES / folder / "README.md").read_text()
        for manifest in (EXAMPLES / folder).glob("*.yaml"):
            assert manifest.name in text


@pytest.mark.parametrize("case", CASES)
def test_helm_finds_nothing_to_say(case: str) -> None:
    report = lint(CHART, CASES[case], strict=True, namespace="hymcache", kube_version="1.36.0")
    messages = [m for m in report["messages"] or () if "icon" not in str(m)]
    assert messages == []


@pytest.mark.parametrize("case", CASES)
def test_the_command_line_takes_what_the_chart_passes(case: str) -> None:
    commands = typer.main.get_group(app)
    seen = set()
    for container in containers(rendered(case)):
        dra, name, *arguments = container["args"]
        assert dra == "dra"
        seen.add(name)
        environment = {e["name"]: e.get("value", "value") for e in container.get("env", ())}
        with pytest.MonkeyPatch.context() as patch:
            for variable, value in environment.items():
                patch.setenv(variable, value)
            context = commands.make_context("dra", [name, *arguments])
            _, command, rest = commands.resolve_command(context, [name, *arguments])
            assert command is not None
            # Raises on an unknown option and on a value that is none.
            command.make_context(name, rest)
    assert {"controller", "kubelet-plugin"} <= seen


@pytest.mark.parametrize("case", CASES)
def test_what_a_pod_mounts_is_there(case: str) -> None:
    manifests = rendered(case)
    secrets = {secret["metadata"]["name"] for secret in of_kind(manifests, "Secret")}
    given = {"cfm-ca", "agents", "agents-tls"}
    accounts = {account["metadata"]["name"] for account in of_kind(manifests, "ServiceAccount")}
    for workload in workloads(manifests):
        pod = workload["spec"]["template"]["spec"]
        assert pod.get("serviceAccountName") in accounts or not pod["automountServiceAccountToken"]
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        for container in pod["containers"]:
            assert {mount["name"] for mount in container["volumeMounts"]} == set(volumes)
        for volume in volumes.values():
            if "secret" in volume:
                assert volume["secret"]["secretName"] in secrets | given
        labels = workload["spec"]["template"]["metadata"]["labels"]
        assert workload["spec"]["selector"]["matchLabels"].items() <= labels.items()


def test_parts_that_look_at_devices_see_those_that_come_later() -> None:
    for name in ("-kubeletplugin", "-hostagent"):
        pod = named(rendered("least"), "DaemonSet", name)["spec"]["template"]["spec"]
        (volume,) = (
            v["name"] for v in pod["volumes"] if v.get("hostPath", {}).get("path") == "/dev"
        )
        mounts = {
            mount["name"]: mount["mountPath"] for mount in pod["containers"][0]["volumeMounts"]
        }
        assert mounts[volume] == "/dev"


def test_workloads_do_not_select_each_others_pods() -> None:
    selectors = [
        tuple(sorted(workload["spec"]["selector"]["matchLabels"].items()))
        for workload in workloads(rendered("simulated"))
    ]
    assert len(selectors) == len(set(selectors)) == 4


def test_the_names_are_those_of_the_papers_driver() -> None:
    manifests = rendered("least")
    (device_class,) = of_kind(manifests, "DeviceClass")
    assert device_class["metadata"]["name"] == names.DEVICE_CLASS
    plugin = named(manifests, "DaemonSet", "-kubeletplugin")
    environment = plugin["spec"]["template"]["spec"]["containers"][0]["env"]
    values = {entry["name"]: entry.get("value") for entry in environment}
    assert values["DRIVER_NAME"] == names.DRIVER_NAME
    assert values["CDI_ROOT"] == names.CDI_ROOT
    assert values["HEALTHCHECK_PORT"] == "51515"


def test_the_kubelet_plugin_is_updated_without_a_gap() -> None:
    plugin = named(rendered("least"), "DaemonSet", "-kubeletplugin")
    update = plugin["spec"]["updateStrategy"]["rollingUpdate"]
    assert update == {"maxSurge": 1, "maxUnavailable": 0}
    pod = plugin["spec"]["template"]["spec"]
    assert pod["priorityClassName"] == "system-node-critical"
    (container,) = pod["containers"]
    assert container["livenessProbe"]["grpc"] == {"port": 51515, "service": "liveness"}


def test_another_driver_name_is_the_same_everywhere() -> None:
    text = yaml.safe_dump_all(rendered("everything"))
    assert "cxl.example.com" in text
    assert names.DRIVER_NAME not in text


def test_the_chart_is_of_the_same_version_as_the_package() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["appVersion"] == __version__


def fault_of(values: Values) -> str:
    with pytest.raises(HelmError) as raised:
        render(values)
    return str(raised.value)


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"contoller": {"replicas": 2}}, "additional properties 'contoller' not allowed"),
        ({"controller": {"replicas": "two"}}, "/controller/replicas': got string, want integer"),
        ({"controller": {"replicas": 0}}, "/controller/replicas': minimum: got 0, want 1"),
        ({"controller": {"fabricPeriod": "often"}}, "/controller/fabricPeriod': 'often' does not"),
        ({"controller": {"defaultQos": 3}}, "/controller/defaultQos': value must be one of"),
        ({"fabricManager": {"url": "cfm:8080"}}, "/fabricManager/url': 'cfm:8080' does not"),
        ({"fabricManager": {"dialect": "french"}}, "one of 'paper', 'public'"),
        ({"driverName": "Not A Name"}, "/driverName': 'Not A Name' does not match"),
        ({"hostAgent": {"backend": "tape"}}, "/hostAgent/backend': value must be one of"),
        ({"hostAgent": {"port": 70000}}, "/hostAgent/port': maximum: got 70,000, want 65,535"),
        ({"kubeletPlugin": {"cdiFolder": "cdi"}}, "/kubeletPlugin/cdiFolder': 'cdi' does not"),
        ({"simulator": {"capacity": "64 apples"}}, "/simulator/capacity': '64 apples' does not"),
        ({"image": {"pullPolicy": "Sometimes"}}, "/image/pullPolicy': value must be one of"),
        ({"verbose": "yes"}, "/verbose': got string, want boolean"),
    ],
)
def test_a_wrong_value_is_told_in_one_line(values: Values, told: str) -> None:
    fault = fault_of(values)
    # Helm's own heading, which names the chart, then a line for each fault.
    heading, chart, *lines = fault.strip().splitlines()
    assert heading.startswith("values don't meet the specifications of the schema")
    assert chart == "hymcache-dra:"
    (line,) = lines
    assert told in line


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({}, "fabricManager.url: name the fabric manager, e.g. --set fabricManager.url=https"),
        (with_values(LEAST, hostAgent={"tls": {}}), "hostAgent.tls: name the nodes"),
        (with_values(LEAST, hostAgent={"backend": "file"}), "hostAgent.memoryFolder: backend file"),
        (with_values(LEAST, hostAgent={"memoryFolder": "/m"}), "is for hostAgent.backend=file"),
        (with_values(SIMULATED, simulator={"hosts": []}), "simulator.hosts: name the nodes"),
        (with_values(SIMULATED, hostAgent={"enabled": False}), "hostAgent.backend: the simulator"),
        (with_values(SIMULATED, fabricManager={"url": "http://x"}), "set one of the two"),
        (with_values(OUTER_AGENTS, fabricManager={"dialect": "public"}), "needs the agents"),
    ],
)
def test_values_that_need_each_other_are_told_with_the_fix(values: Values, told: str) -> None:
    fault = fault_of(values)
    assert told in fault
    assert len(fault.strip().splitlines()) == 1


def test_the_two_kinds_of_faults_are_told_apart() -> None:
    with pytest.raises(HelmValuesError):
        render({"controller": {"replicas": "two"}})
    with pytest.raises(HelmRenderError):
        render({})


def test_every_value_is_in_the_schema_and_the_other_way_round() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    schema = yaml.safe_load((CHART / "values.schema.json").read_text())

    def compare(value: Any, schema: dict[str, Any], path: str) -> None:
        properties = schema.get("properties")
        if properties is None:
            return
        # Helm itself passes global on to charts.
        assert set(properties) - {"global"} == set(value), path
        assert schema["additionalProperties"] is False, path
        for name, part in value.items():
            compare(part, properties[name], f"{path}.{name}")

    compare(values, schema, "values")


def test_secrets_are_in_no_argument_and_no_variable() -> None:
    for container in containers(rendered("least")):
        text = yaml.safe_dump({"args": container["args"], "env": container.get("env")})
        assert not re.search("password|BEGIN", text)
