"""The plugin's sockets in the kubelet's folders: names, left-overs, and their end.

Each pod of the DaemonSet has its own (`-<pod UID>` in the name): during a rolling update the new
pod serves beside the old one.
"""

from __future__ import annotations

import logging
import os
import socket
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from hymcache.errors import ConfigError

# sockaddr_un: 108 bytes with the zero at the end. The kubelet connects by the full path.
_PATH_BYTES_MAX: Final = 107
# Fewer characters of a UID would let two pods meet.
_UID_CHARS_MIN: Final = 8
_CONNECT_S: Final = 1.0

logger = logging.getLogger("hymcache.dra.kubelet_plugin")


@dataclass(frozen=True, slots=True)
class PluginSockets:
    """Where a plugin listens: for the kubelet's calls, and to be registered."""

    plugin: Path
    registration: Path

    @classmethod
    def named(
        cls, driver: str, pod_uid: str, plugins_folder: Path, registrar_folder: Path
    ) -> PluginSockets:
        """Those of a pod; of the only plugin on the node where `pod_uid` is empty.

        Raises ConfigError where a path is too long for a socket.
        """
        return cls(
            _name(plugins_folder / driver, "dra", pod_uid, ".sock"),
            _name(registrar_folder, driver, pod_uid, "-reg.sock"),
        )


def remove_left_overs(sockets: PluginSockets, driver: str) -> None:
    """Removes sockets of this driver that nobody listens on: of pods that were killed.

    The kubelet would try to register them for ever.
    """
    left = [
        *sockets.plugin.parent.glob("dra*.sock"),
        *sockets.registration.parent.glob(f"{driver}*-reg.sock"),
    ]
    for path in left:
        if _is_dead(path):
            logger.info("removing %s: nobody listens on it", path)
            path.unlink(missing_ok=True)


def make_way(path: Path) -> None:
    """Removes a predecessor's socket of this very name, which has no UID in it then."""
    path.unlink(missing_ok=True)


class OwnedSocket:
    """A socket file that this process made: it removes no successor's of the same name."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._inode = path.stat().st_ino

    def remove(self) -> None:
        """Removes the file, if it is still this process's."""
        try:
            if self._path.stat().st_ino == self._inode:
                self._path.unlink()
        except FileNotFoundError:
            return


def _name(folder: Path, prefix: str, pod_uid: str, suffix: str) -> Path:
    path = folder / f"{prefix}-{pod_uid}{suffix}" if pod_uid else folder / f"{prefix}{suffix}"
    excess = len(os.fsencode(path)) - _PATH_BYTES_MAX
    if excess <= 0:
        return path
    if not pod_uid or len(pod_uid) - excess < _UID_CHARS_MIN:
        raise ConfigError(
            f"{path}: {excess} bytes too long for a socket; "
            "choose a shorter folder or --driver-name"
        )
    # The file's name means nothing to the kubelet; it only has to be this pod's own.
    return folder / f"{prefix}-{pod_uid[:-excess]}{suffix}"


def _is_dead(path: Path) -> bool:
    try:
        if not stat.S_ISSOCK(path.stat().st_mode):
            return False
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.settimeout(_CONNECT_S)
            probe.connect(str(path))
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    return False
