"""The chart grants what the processes ask of the API server, and nothing that lets them do harm."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hymcache.dra import cluster
from tests.dra.chart.rendering import Manifest, named, of_kind, rendered
from tests.dra.system.world import World

# What the test itself does through the same API server, as a user and an administrator.
OF_THE_TEST = {
    ("", "namespaces", "create"),
    ("", "nodes", "create"),
    ("", "pods", "create"),
    ("", "pods", "delete"),
    ("", "serviceaccounts", "get"),
    ("resource.k8s.io", "deviceclasses", "create"),
    ("resource.k8s.io", "resourceclaims", "create"),
    ("resource.k8s.io", "resourceclaims", "delete"),
}


def grants(*roles: Manifest) -> set[tuple[str, str, str]]:
    """(group, resource, verb) of some roles."""
    return {
        (group, resource, verb)
        for role in roles
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


def controller_grants() -> set[tuple[str, str, str]]:
    manifests = rendered("least")
    return grants(
        named(manifests, "ClusterRole", "-controller"), named(manifests, "Role", "-controller")
    )


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("minor", [34, 36])
def test_the_controller_may_do_all_that_it_does(tmp_path: Path, minor: int) -> None:
    with World(tmp_path, minor=minor) as world:
        world.start_controller()
        world.wait_published()
        world.api.add_claim("kv", 512)
        world.api.add_pod("engine", "kv")
        world.wait_bound("engine")
        world.api.delete(cluster.POD, "engine")
        world.api.delete(cluster.RESOURCE_CLAIM, "kv")
        world.wait_gone("kv")
        requested = world.cluster.requested()
    assert ("resource.k8s.io", "resourceslices", "create") in requested
    assert requested - OF_THE_TEST - controller_grants() == set()


def test_status_of_devices_is_granted_for_this_driver_alone() -> None:
    role = named(rendered("everything"), "ClusterRole", "-controller")
    (rule,) = [rule for rule in role["rules"] if "resourceclaims/driver" in rule["resources"]]
    assert rule["resourceNames"] == ["cxl.example.com"]
    assert set(rule["verbs"]) == {"arbitrary-node:update", "arbitrary-node:patch"}


def test_the_kubelet_plugin_only_reads_claims() -> None:
    role = named(rendered("least"), "ClusterRole", "-kubeletplugin")
    resource = ("resource.k8s.io", "resourceclaims")
    assert grants(role) == {(*resource, verb) for verb in ("get", "list", "watch")}


def test_nothing_is_granted_by_wildcard_and_no_secret_can_be_read() -> None:
    for case in ("least", "simulated", "everything"):
        manifests = rendered(case)
        roles = [*of_kind(manifests, "ClusterRole"), *of_kind(manifests, "Role")]
        granted = grants(*roles)
        assert not any("*" in part for grant in granted for part in grant)
        assert not any(resource.startswith("secrets") for _, resource, _ in granted)


def test_every_role_is_bound_to_an_account_of_the_chart() -> None:
    manifests = rendered("least")

    def name(manifest: Manifest) -> Any:
        return manifest["metadata"]["name"]

    accounts = {name(account) for account in of_kind(manifests, "ServiceAccount")}
    for kind in ("Role", "ClusterRole"):
        roles = {name(role) for role in of_kind(manifests, kind)}
        bindings = of_kind(manifests, f"{kind}Binding")
        assert {binding["roleRef"]["name"] for binding in bindings} == roles
        for binding in bindings:
            (subject,) = binding["subjects"]
            assert subject["name"] in accounts
            assert subject["namespace"] == "hymcache"
