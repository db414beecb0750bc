"""The chart rendered offline by Helm itself, and what is in it."""

from __future__ import annotations

import base64
import copy
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, Final

import yaml
from helm_python.chart import Chart

REPOSITORY: Final = Path(__file__).parents[3]
CHART: Final = REPOSITORY / "deploy" / "helm" / "hymcache-dra"
EXAMPLES: Final = REPOSITORY / "deploy" / "examples" / "dra"
NAMESPACE: Final = "hymcache"
RELEASE: Final = "cxl"

Manifest = dict[str, Any]
Values = dict[str, Any]

# The least that an installation needs.
LEAST: Final[Values] = {
    "fabricManager": {"url": "https://cfm.example:8080"},
    "hostAgent": {"tls": {"nodeNames": ["node-1", "node-2"]}},
}
SIMULATED: Final[Values] = {
    "simulator": {"enabled": True, "hosts": ["node-1", "node-2"]},
    "hostAgent": {
        "backend": "file",
        "memoryFolder": "/var/lib/hymcache/memory",
        "tls": {"nodeNames": ["node-1", "node-2"]},
    },
}
EVERYTHING: Final[Values] = {
    "fullnameOverride": "composable",
    "driverName": "cxl.example.com",
    "image": {"repository": "registry.example/hymcache", "tag": "2.0", "pullPolicy": "Always"},
    "imagePullSecrets": [{"name": "pull"}],
    "verbose": True,
    "fabricManager": {
        "url": "https://cfm.example:8080/",
        "dialect": "public",
        "caSecretName": "cfm-ca",
    },
    "controller": {
        "replicas": 3,
        "fenceAfter": "10min",
        "giveUpAfter": "24h",
        "exclusive": True,
        "defaultQos": 4,
        "nodeSelector": {"role": "infra"},
        "tolerations": [{"operator": "Exists"}],
        "affinity": {"podAntiAffinity": {}},
    },
    "kubeletPlugin": {
        "healthcheckPort": -1,
        "metricsPort": -1,
        "nodeSelector": {"cxl.seagate.com/host": "true"},
        "tolerations": [{"operator": "Exists"}],
    },
    "hostAgent": {"credentialsSecretName": "agents", "tls": {"secretName": "agents-tls"}},
}
OUTER_AGENTS: Final[Values] = {
    "fabricManager": {"url": "http://cfm.example:8080"},
    "hostAgent": {"enabled": False},
    "admissionPolicy": {"enabled": False},
    "deviceClass": {"extendedResourceName": ""},
}
CASES: Final = {
    "least": LEAST,
    "simulated": SIMULATED,
    "everything": EVERYTHING,
    "outer-agents": OUTER_AGENTS,
}


def with_values(base: Values, **sections: Values) -> Values:
    """The values with some keys of sections changed."""
    changed = copy.deepcopy(base)
    for name, section in sections.items():
        changed.setdefault(name, {}).update(section)
    return changed


def render(values: Values) -> list[Manifest]:
    """All manifests. Raises HelmError as `helm install` would tell it."""
    with Chart.load(CHART) as chart:
        files = chart.render(values, name=RELEASE, namespace=NAMESPACE)
    return [
        document
        for path, text in sorted(files.items())
        if path.endswith(".yaml")
        for document in yaml.safe_load_all(text)
        if document
    ]


@cache
def rendered(case: str) -> list[Manifest]:
    """The manifests of one of CASES; not to be changed."""
    return render(CASES[case])


def of_kind(manifests: list[Manifest], kind: str) -> list[Manifest]:
    return [manifest for manifest in manifests if manifest["kind"] == kind]


def named(manifests: list[Manifest], kind: str, ending: str) -> Manifest:
    (found,) = [m for m in of_kind(manifests, kind) if m["metadata"]["name"].endswith(ending)]
    return found


def write_secret(secret: Manifest, folder: Path) -> None:
    """As it is mounted."""
    folder.mkdir()
    for key, value in secret["data"].items():
        (folder / key).write_bytes(base64.b64decode(value))


def workloads(manifests: list[Manifest]) -> Iterator[Manifest]:
    """Everything that runs pods."""
    for manifest in manifests:
        if manifest["kind"] in {"Deployment", "DaemonSet", "StatefulSet"}:
            yield manifest


def containers(manifests: list[Manifest]) -> Iterator[Manifest]:
    for workload in workloads(manifests):
        yield from workload["spec"]["template"]["spec"]["containers"]


def example_manifests() -> Iterator[tuple[Path, Manifest]]:
    """All documents of the examples, each with its file."""
    for path in sorted(EXAMPLES.glob("*/*.yaml")):
        for document in yaml.safe_load_all(path.read_text()):
            yield path, document
