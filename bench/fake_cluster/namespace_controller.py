"""What kube-controller-manager puts into every namespace, beside what others put there."""

from __future__ import annotations

from typing import Final

from hymcache.bench.fake_cluster.object_store import Change, Item, ObjectStore
from hymcache.dra.cluster import CONFIG_MAP, ResourceKind

# A real API server refuses pods in a namespace until it has one.
SERVICE_ACCOUNT: Final = ResourceKind("v1", "ServiceAccount", "serviceaccounts", True)


class NamespaceController:
    """Serves the namespaces that are made after it."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        store.listen(self._notice)

    def _notice(self, change: Change) -> None:
        if change.kind == "Namespace" and change.event == "ADDED":
            namespace = change.item["metadata"]["name"]
            self._add(SERVICE_ACCOUNT, namespace, "default", {})
            self._add(CONFIG_MAP, namespace, "kube-root-ca.crt", {"data": {"ca.crt": ""}})

    def _add(self, kind: ResourceKind, namespace: str, name: str, body: Item) -> None:
        metadata = {"name": name, "namespace": namespace}
        whole = {"apiVersion": kind.api_version, "kind": kind.kind, "metadata": metadata, **body}
        self._store.create(kind.kind, whole)
