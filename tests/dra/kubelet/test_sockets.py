"""Names of the plugin's sockets, and what is left of others."""

from __future__ import annotations

import socket
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from hymcache.dra.kubelet_plugin.sockets import OwnedSocket, PluginSockets, remove_left_overs
from hymcache.errors import ConfigError

_DRIVER = "cfm-dra-plugin.cxl.seagate.com"
_UID = "0b2f6b7e-3d6c-4a55-9a43-1f6f8a0c9d10"
_PLUGINS = Path("/var/lib/kubelet/plugins")
_REGISTRAR = Path("/var/lib/kubelet/plugins_registry")


def test_the_names_are_those_of_kubernetes() -> None:
    alone = PluginSockets.named("cxl.example.com", "", _PLUGINS, _REGISTRAR)
    assert alone.plugin == _PLUGINS / "cxl.example.com/dra.sock"
    assert alone.registration == _REGISTRAR / "cxl.example.com-reg.sock"
    pod = PluginSockets.named("cxl.example.com", _UID, _PLUGINS, _REGISTRAR)
    assert pod.plugin == _PLUGINS / f"cxl.example.com/dra-{_UID}.sock"
    assert pod.registration == _REGISTRAR / f"cxl.example.com-{_UID}-reg.sock"


def test_the_default_names_fit_into_a_socket_address() -> None:
    # The papers' driver, a pod's UID and the kubelet's folder are 3 bytes too many together.
    sockets = PluginSockets.named(_DRIVER, _UID, _PLUGINS, _REGISTRAR)
    assert len(str(sockets.registration)) == 107
    assert sockets.registration.name == f"{_DRIVER}-{_UID[:-3]}-reg.sock"
    assert sockets.plugin.name == f"dra-{_UID}.sock"


@pytest.mark.parametrize(("driver", "uid"), [("d" * 100, ""), ("d" * 70, _UID)])
def test_a_name_that_cannot_fit_is_told(driver: str, uid: str) -> None:
    with pytest.raises(ConfigError, match="bytes too long for a socket; choose a shorter"):
        PluginSockets.named(driver, uid, _PLUGINS, _REGISTRAR)


def test_only_sockets_that_nobody_listens_on_are_removed() -> None:
    with TemporaryDirectory() as root:
        plugins, registrar = Path(root) / "p", Path(root) / "r"
        sockets = PluginSockets.named("d", "new", plugins, registrar)
        (plugins / "d").mkdir(parents=True)
        registrar.mkdir()
        dead = [plugins / "d/dra-old.sock", registrar / "d-old-reg.sock"]
        others = registrar / "other.example.com-reg.sock"
        listening = registrar / "d-live-reg.sock"
        for path in (*dead, others):
            with socket.socket(socket.AF_UNIX) as left:
                left.bind(str(path))
        with socket.socket(socket.AF_UNIX) as live:
            live.bind(str(listening))
            live.listen()
            remove_left_overs(sockets, "d")
        assert not any(path.exists() for path in dead)
        assert listening.exists()
        assert others.exists()


def test_a_successors_socket_is_not_removed(tmp_path: Path) -> None:
    path = tmp_path / "dra.sock"
    path.touch()
    old = OwnedSocket(path)
    (tmp_path / "new").touch()
    (tmp_path / "new").replace(path)
    old.remove()
    assert path.exists()
    OwnedSocket(path).remove()
    assert not path.exists()
    old.remove()
