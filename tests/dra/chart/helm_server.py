"""As much of an API server as Helm needs to install a chart and to look up what it installed."""

from __future__ import annotations

import json
import threading
from collections import defaultdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from hymcache.bench.fake_cluster.kubeconfig import write_kubeconfig
from tests.dra.chart.rendering import Manifest

_CLUSTER_WIDE = frozenset(
    {
        "ClusterRole",
        "ClusterRoleBinding",
        "DeviceClass",
        "ValidatingAdmissionPolicy",
        "ValidatingAdmissionPolicyBinding",
    }
)
_VERBS = ["get", "list", "create", "update", "patch", "delete"]


class HelmServer:
    """Knows the kinds of `manifests`; keeps objects as they are sent, by their paths."""

    def __init__(self, manifests: list[Manifest], kubeconfig: Path) -> None:
        self.stored: dict[str, Manifest] = {}
        self.kubeconfig = kubeconfig
        self._kinds: defaultdict[str, set[str]] = defaultdict(set)
        for manifest in manifests:
            self._kinds[manifest["apiVersion"]].add(manifest["kind"])
        self._server = _Server(("127.0.0.1", 0), _Handler)
        self._server.api = self
        self._thread = threading.Thread(
            target=self._server.serve_forever, name="helm server", daemon=True
        )

    def __enter__(self) -> Self:
        self._thread.start()
        write_kubeconfig(self.kubeconfig, f"http://127.0.0.1:{self._server.server_port}")
        return self

    def __exit__(
        self,
        _type: type[BaseException] | None,
        _value: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(10)

    @property
    def manifests(self) -> list[Manifest]:
        """All objects that were sent."""
        return list(self.stored.values())

    def answer(self, method: str, path: str, body: bytes) -> tuple[int, Any]:
        """The status and what comes with it."""
        if method == "GET":
            found = self.stored.get(path) or self._discovery().get(path)
            if found is None:
                return 404, {"kind": "Status", "status": "Failure", "reason": "NotFound"}
            return 200, found
        # Server-side apply by the one who has all fields: what is sent is what is stored.
        if method != "PATCH":
            return 405, {"kind": "Status", "status": "Failure", "reason": "MethodNotAllowed"}
        status = 200 if path in self.stored else 201
        item: Manifest = json.loads(body)
        self.stored[path] = item
        return status, item

    # --- what a client asks first --------------------------------------------------------------

    def _discovery(self) -> dict[str, Any]:
        places = {_place(api_version): api_version for api_version in self._kinds}
        urls = {p.lstrip("/"): {"serverRelativeURL": f"/openapi/v3{p}"} for p in places}
        return {
            "/version": {"major": "1", "minor": "36", "gitVersion": "v1.36.0"},
            "/api": {"kind": "APIVersions", "versions": ["v1"]},
            "/apis": {"kind": "APIGroupList", "apiVersion": "v1", "groups": self._groups()},
            "/openapi/v3": {"paths": urls},
            **{place: self._resources(places[place]) for place in places},
            **{f"/openapi/v3{place}": self._openapi(places[place]) for place in places},
        }

    def _resources(self, api_version: str) -> dict[str, Any]:
        return {
            "kind": "APIResourceList",
            "apiVersion": "v1",
            "groupVersion": api_version,
            "resources": [_resource(kind) for kind in sorted(self._kinds[api_version])],
        }

    def _groups(self) -> list[dict[str, Any]]:
        groups = []
        for api_version in sorted(self._kinds):
            group, _, version = api_version.rpartition("/")
            if group:
                known = {"groupVersion": api_version, "version": version}
                groups.append({"name": group, "versions": [known], "preferredVersion": known})
        return groups

    def _openapi(self, api_version: str) -> dict[str, Any]:
        """That the server validates what it is sent; the schemas are others' to test."""
        group, _, version = api_version.rpartition("/")
        paths = {
            f"{_place(api_version)}/{_plural(kind)}/{{name}}": {
                "patch": {
                    "parameters": [{"name": "fieldValidation", "in": "query"}],
                    "responses": {},
                    "x-kubernetes-group-version-kind": {
                        "group": group,
                        "version": version,
                        "kind": kind,
                    },
                }
            }
            for kind in self._kinds[api_version]
        }
        return {"openapi": "3.0.0", "info": {"title": "k", "version": "1"}, "paths": paths}


class _Server(ThreadingHTTPServer):
    api: HelmServer


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer()

    def do_PATCH(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._answer()

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - its name there
        """Nothing: the test says what is wrong."""

    def _answer(self) -> None:
        assert isinstance(self.server, _Server)
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        status, answer = self.server.api.answer(self.command, self.path.partition("?")[0], body)
        text = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)


def _place(api_version: str) -> str:
    return f"/apis/{api_version}" if "/" in api_version else f"/api/{api_version}"


def _plural(kind: str) -> str:
    name = kind.lower()
    if name.endswith("y"):
        return f"{name[:-1]}ies"
    return f"{name}es" if name.endswith("s") else f"{name}s"


def _resource(kind: str) -> dict[str, Any]:
    return {
        "name": _plural(kind),
        "singularName": kind.lower(),
        "kind": kind,
        "namespaced": kind not in _CLUSTER_WIDE,
        "verbs": _VERBS,
    }
