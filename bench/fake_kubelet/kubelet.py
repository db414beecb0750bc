"""The kubelet's side of DRA: registration, preparing, and the health of devices."""

from __future__ import annotations

import stat
import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import grpc

from hymcache.dra.kubelet_plugin import (
    health_pb2,
    health_pb2_grpc,
    plugin_pb2,
    plugin_pb2_grpc,
    registration_pb2,
    registration_pb2_grpc,
)

DIAL_TIMEOUT_S: Final = 10.0
GET_INFO_TIMEOUT_S: Final = 1.0
PREPARE_TIMEOUT_S: Final = 45.0
# Until a claim that could not be prepared is tried again.
RETRY_S: Final = 11.0
_VERSION: Final = "v1.DRAPlugin"
_HEALTH_VERSION: Final = "v1alpha1.DRAResourceHealth"
# Stands for the kubelet's inotify.
_LOOK_S: Final = 0.05
_HEALTH_TIMEOUT_DEFAULT_S: Final = 30

Claim = plugin_pb2.Claim
Device = plugin_pb2.Device


class PrepareFailed(Exception):
    """What the plugin, or gRPC, says of each claim that is not prepared: UID -> reason."""

    def __init__(self, reasons: dict[str, str]) -> None:
        super().__init__("; ".join(f"{uid}: {reason}" for uid, reason in reasons.items()))
        self.reasons = reasons


@dataclass(frozen=True)
class HealthState:
    """A device's health as it shows in a pod's status: Healthy, Unhealthy or Unknown."""

    health: str
    message: str
    updated_s: int
    timeout_s: int


@dataclass
class RegisteredPlugin:
    """A plugin as the kubelet keeps it. Of a driver with several, the newest counts."""

    name: str
    endpoint: str
    socket: Path
    supported_versions: tuple[str, ...]
    channel: grpc.Channel
    health: dict[tuple[str, str], HealthState] = field(default_factory=dict)
    health_messages: int = 0


class FakeKubelet:
    """Watches `root`/plugins_registry and calls the plugins that it finds there."""

    def __init__(self, root: Path, *, retry_s: float = RETRY_S) -> None:
        self.root = root
        self.registry = root / "plugins_registry"
        self.plugins_folder = root / "plugins"
        self._retry_s = retry_s
        self._plugins: dict[Path, RegisteredPlugin] = {}
        self._changed = threading.Condition()
        self._stopped = threading.Event()
        self._refused: dict[Path, str] = {}
        self._thread = threading.Thread(target=self._watch, name="kubelet", daemon=True)
        for folder in (self.registry, self.plugins_folder):
            folder.mkdir(parents=True, exist_ok=True)

    def start(self) -> None:
        """Looks for plugins from now on."""
        self._thread.start()

    def stop(self) -> None:
        """Forgets all plugins; does not unprepare."""
        self._stopped.set()
        self._thread.join(DIAL_TIMEOUT_S)
        for socket in list(self._plugins):
            self._forget(socket)

    def __enter__(self) -> FakeKubelet:
        self.start()
        return self

    def __exit__(self, *_raised: object) -> None:
        self.stop()

    # --- registration --------------------------------------------------------------------------

    def plugins(self, driver: str) -> tuple[RegisteredPlugin, ...]:
        """The registered plugins of a driver, the oldest first."""
        with self._changed:
            return self._named(driver)

    def wait_registered(
        self, driver: str, count: int = 1, timeout_s: float = 10.0
    ) -> RegisteredPlugin:
        """The newest plugin of a driver, when there are `count` of them, one at least."""
        self._wait_count(driver, count, timeout_s)
        return self.plugins(driver)[-1]

    def wait_gone(self, driver: str, timeout_s: float = 10.0) -> None:
        """When no plugin of a driver is registered."""
        self._wait_count(driver, 0, timeout_s)

    def _wait_count(self, driver: str, count: int, timeout_s: float) -> None:
        with self._changed:
            if not self._changed.wait_for(lambda: len(self._named(driver)) == count, timeout_s):
                raise TimeoutError(f"{count} plugins of {driver}; refused: {self._refused}")

    def _named(self, driver: str) -> tuple[RegisteredPlugin, ...]:
        return tuple(p for p in self._plugins.values() if p.name == driver)

    def _watch(self) -> None:
        while not self._stopped.wait(_LOOK_S):
            found = {path for path in self.registry.glob("*.sock") if _is_socket(path)}
            for path in set(self._plugins) - found:
                self._forget(path)
            for path in sorted(found - set(self._plugins)):
                self._register(path)

    def _register(self, socket: Path) -> None:
        try:
            with grpc.insecure_channel(f"unix:{socket}") as channel:
                grpc.channel_ready_future(channel).result(DIAL_TIMEOUT_S)
                stub = registration_pb2_grpc.RegistrationStub(channel)
                info = stub.GetInfo(registration_pb2.InfoRequest(), timeout=GET_INFO_TIMEOUT_S)
                fault = _fault(info)
                stub.NotifyRegistrationStatus(
                    registration_pb2.RegistrationStatus(
                        plugin_registered=not fault, error=fault or ""
                    ),
                    timeout=GET_INFO_TIMEOUT_S,
                )
        except (grpc.RpcError, grpc.FutureTimeoutError) as error:
            self._refused[socket] = str(error)
            return
        if fault:
            self._refused[socket] = fault
            return
        plugin = RegisteredPlugin(
            info.name,
            info.endpoint,
            socket,
            tuple(info.supported_versions),
            grpc.insecure_channel(f"unix:{info.endpoint}"),
        )
        with self._changed:
            self._plugins[socket] = plugin
            self._changed.notify_all()
        if _HEALTH_VERSION in plugin.supported_versions:
            threading.Thread(
                target=self._follow_health, args=(plugin,), name="health", daemon=True
            ).start()

    def _forget(self, socket: Path) -> None:
        with self._changed:
            plugin = self._plugins.pop(socket)
            self._changed.notify_all()
        plugin.channel.close()

    # --- preparing -----------------------------------------------------------------------------

    def prepare(
        self, driver: str, claims: Sequence[Claim], *, timeout_s: float = PREPARE_TIMEOUT_S
    ) -> dict[str, tuple[Device, ...]]:
        """One try: UID -> devices. Raises PrepareFailed, and KeyError without a plugin."""
        answer = self._stub(driver).NodePrepareResources(
            plugin_pb2.NodePrepareResourcesRequest(claims=claims), timeout=timeout_s
        )
        reasons = {}
        for claim in claims:
            if claim.uid not in answer.claims:
                reasons[claim.uid] = "skipped by the plugin"
            elif answer.claims[claim.uid].error:
                reasons[claim.uid] = answer.claims[claim.uid].error
        if reasons:
            raise PrepareFailed(reasons)
        return {claim.uid: tuple(answer.claims[claim.uid].devices) for claim in claims}

    def prepare_in_the_end(
        self, driver: str, claims: Sequence[Claim], timeout_s: float
    ) -> dict[str, tuple[Device, ...]]:
        """Tries again and again, as the kubelet does for a pod that does not start."""
        end_s = time.monotonic() + timeout_s
        while True:
            try:
                return self.prepare(driver, claims)
            except (PrepareFailed, KeyError, grpc.RpcError):
                if time.monotonic() + self._retry_s > end_s:
                    raise
            time.sleep(self._retry_s)

    def unprepare(self, driver: str, claims: Iterable[Claim]) -> None:
        """Raises PrepareFailed where the plugin cannot."""
        answer = self._stub(driver).NodeUnprepareResources(
            plugin_pb2.NodeUnprepareResourcesRequest(claims=claims), timeout=PREPARE_TIMEOUT_S
        )
        reasons = {uid: claim.error for uid, claim in answer.claims.items() if claim.error}
        if reasons:
            raise PrepareFailed(reasons)

    def _stub(self, driver: str) -> plugin_pb2_grpc.DRAPluginStub:
        plugins = self.plugins(driver)
        if not plugins:
            raise KeyError(f"plugin {driver} is not registered")
        stub: plugin_pb2_grpc.DRAPluginStub = plugin_pb2_grpc.DRAPluginStub(plugins[-1].channel)
        return stub

    # --- health --------------------------------------------------------------------------------

    def health(self, driver: str) -> dict[tuple[str, str], HealthState]:
        """(pool, device) -> its health, of the newest plugin. Unknown after its time-out."""
        now_s = time.time()
        return {
            key: state
            if now_s - state.updated_s <= state.timeout_s
            else HealthState("Unknown", "", state.updated_s, state.timeout_s)
            for key, state in self.plugins(driver)[-1].health.items()
        }

    def wait_health(
        self, driver: str, expected: dict[tuple[str, str], str], timeout_s: float = 10.0
    ) -> dict[tuple[str, str], HealthState]:
        """When all devices, and no others, have the health expected."""
        end_s = time.monotonic() + timeout_s
        while True:
            states = self.health(driver)
            if {key: state.health for key, state in states.items()} == expected:
                return states
            if time.monotonic() > end_s:
                raise TimeoutError(f"{states}, not {expected}")
            time.sleep(_LOOK_S)

    def _follow_health(self, plugin: RegisteredPlugin) -> None:
        stub = health_pb2_grpc.DRAResourceHealthStub(plugin.channel)
        # ValueError: the channel was closed, since the plugin is gone.
        with suppress(grpc.RpcError, ValueError):
            for message in stub.NodeWatchResources(health_pb2.NodeWatchResourcesRequest()):
                plugin.health = {
                    (d.device.pool_name, d.device.device_name): _state(d) for d in message.devices
                }
                plugin.health_messages += 1


def _fault(info: registration_pb2.PluginInfo) -> str | None:
    if info.type != "DRAPlugin":
        return f"no handler registered for plugin type: {info.type}"
    if not info.name:
        return "the plugin has no name"
    if _VERSION not in info.supported_versions:
        return f"none of the services {list(info.supported_versions)} is known"
    if not _is_socket(Path(info.endpoint)):
        return f"no socket {info.endpoint}"
    return None


def _is_socket(path: Path) -> bool:
    try:
        return stat.S_ISSOCK(path.stat().st_mode)
    except OSError:
        return False


def _state(device: health_pb2.DeviceHealth) -> HealthState:
    words = {health_pb2.HEALTHY: "Healthy", health_pb2.UNHEALTHY: "Unhealthy"}
    timeout_s = device.health_check_timeout_seconds or _HEALTH_TIMEOUT_DEFAULT_S
    return HealthState(
        words.get(device.health, "Unknown"), device.message, device.last_updated_time, timeout_s
    )
