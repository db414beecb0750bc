"""A containerd of its own, and pods in it by the kubelet's interface (CRI).

The programs are Debian's, unpacked into the cache by `deploy/install_system_packages.sh
containerd`; nothing of them is installed.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import grpc

from tests.dra.runtime import busybox_image, cri_pb2, cri_pb2_grpc

_START_S = 60.0
_CALL_S = 120.0


def programs_folder() -> Path:
    """Where the unpacked packages are."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "hymcache" / "containerd"


def reason_not_to_run() -> str | None:
    """Why no containers can be run here, with what to do about it; None where they can."""
    if os.geteuid() != 0:
        return "containers need root"
    if not (programs_folder() / "usr/bin/containerd").exists():
        return "no containerd; run: deploy/install_system_packages.sh containerd"
    if not busybox_image.BUSYBOX.exists():
        return "no /bin/busybox; run: deploy/install_system_packages.sh containerd"
    return None


class Containerd:
    """Runs when it is constructed; all of its files are in `folder`."""

    def __init__(self, folder: Path, cdi_root: Path) -> None:
        self._folder = folder
        root = programs_folder()
        self._path = f"{root}/usr/bin:{root}/usr/sbin:{os.environ['PATH']}"
        self._socket = folder / "containerd.sock"
        config = folder / "config.toml"
        config.write_text(self._config(cdi_root, root / "usr/sbin/runc"))
        with (folder / "containerd.log").open("w") as log:
            self._process = subprocess.Popen(
                ["containerd", "--config", str(config)],
                env={**os.environ, "PATH": self._path},
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        self._channel = grpc.insecure_channel(f"unix:{self._socket}")
        self._runtime: Any = cri_pb2_grpc.RuntimeServiceStub(self._channel)
        try:
            self._wait_ready()
            self._import_image()
        except BaseException:
            self.stop()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        _type: type[BaseException] | None,
        _value: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """Ends containerd; its pods have to be gone by then."""
        self._channel.close()
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(10)

    def version(self) -> str:
        """Name and version of the runtime."""
        answer = self._runtime.Version(cri_pb2.VersionRequest(), timeout=_CALL_S)
        return f"{answer.runtime_name} {answer.runtime_version}"

    def start_pod(self) -> Pod:
        """A pod without containers yet."""
        return Pod(self._runtime, str(uuid.uuid4()))

    def _config(self, cdi_root: Path, runc: Path) -> str:
        runtime = "plugins.'io.containerd.cri.v1.runtime'"
        return f"""version = 3
root = "{self._folder}/root"
state = "{self._folder}/state"
[grpc]
address = "{self._socket}"
[ttrpc]
address = "{self._socket}.ttrpc"
[plugins.'io.containerd.cri.v1.images']
snapshotter = "native"
[plugins.'io.containerd.cri.v1.images'.pinned_images]
sandbox = "{busybox_image.NAME}"
[{runtime}]
enable_cdi = true
cdi_spec_dirs = ["{cdi_root}"]
restrict_oom_score_adj = true
disable_apparmor = true
[{runtime}.containerd]
default_runtime_name = "runc"
[{runtime}.containerd.runtimes.runc]
runtime_type = "io.containerd.runc.v2"
[{runtime}.containerd.runtimes.runc.options]
BinaryName = "{runc}"
SystemdCgroup = false
"""

    def _wait_ready(self) -> None:
        end_s = time.monotonic() + _START_S
        while True:
            try:
                self.version()
                return
            except grpc.RpcError:
                if self._process.poll() is not None or time.monotonic() > end_s:
                    log = (self._folder / "containerd.log").read_text()
                    raise AssertionError(f"containerd does not start:\n{log[-4000:]}") from None
            time.sleep(0.2)

    def _import_image(self) -> None:
        archive = self._folder / "image.tar"
        busybox_image.write_image(archive)
        subprocess.run(
            [
                *("ctr", "-a", str(self._socket), "-n", "k8s.io", "images", "import"),
                *("--local", "--snapshotter", "native", str(archive)),
            ],
            env={**os.environ, "PATH": self._path},
            check=True,
            capture_output=True,
            timeout=60,
        )


class Pod:
    """A pod on the node's network, in a cgroup as the kubelet names it."""

    def __init__(self, runtime: Any, uid: str) -> None:
        self.uid = uid
        self._runtime = runtime
        options = cri_pb2.NamespaceOption(network=cri_pb2.NODE, pid=cri_pb2.CONTAINER)
        self._options = options
        self._config = cri_pb2.PodSandboxConfig(
            metadata=cri_pb2.PodSandboxMetadata(name=f"pod-{uid}", uid=uid, namespace="default"),
            linux=cri_pb2.LinuxPodSandboxConfig(
                cgroup_parent=f"/kubepods/burstable/pod{uid}",
                security_context=cri_pb2.LinuxSandboxSecurityContext(namespace_options=options),
            ),
        )
        self._sandbox = runtime.RunPodSandbox(
            cri_pb2.RunPodSandboxRequest(config=self._config), timeout=_CALL_S
        ).pod_sandbox_id

    def start_container(
        self, cdi_names: Sequence[str], command: Sequence[str] = (), *, user: int = 0
    ) -> str:
        """Id of a container that runs; grpc.RpcError where the runtime refuses it."""
        config = cri_pb2.ContainerConfig(
            metadata=cri_pb2.ContainerMetadata(name=f"c-{uuid.uuid4().hex[:8]}"),
            image=cri_pb2.ImageSpec(image=busybox_image.NAME),
            command=command,
            linux=cri_pb2.LinuxContainerConfig(
                security_context=cri_pb2.LinuxContainerSecurityContext(
                    namespace_options=self._options, run_as_user=cri_pb2.Int64Value(value=user)
                )
            ),
            CDI_devices=[cri_pb2.CDIDevice(name=name) for name in cdi_names],
        )
        container = self._runtime.CreateContainer(
            cri_pb2.CreateContainerRequest(
                pod_sandbox_id=self._sandbox, config=config, sandbox_config=self._config
            ),
            timeout=_CALL_S,
        ).container_id
        self._runtime.StartContainer(
            cri_pb2.StartContainerRequest(container_id=container), timeout=_CALL_S
        )
        return str(container)

    def run(self, container: str, script: str) -> str:
        """What a shell in the container prints; it has to end well."""
        answer = self._runtime.ExecSync(
            cri_pb2.ExecSyncRequest(container_id=container, cmd=["sh", "-c", script], timeout=30),
            timeout=_CALL_S,
        )
        assert answer.exit_code == 0, answer.stderr.decode()
        return str(answer.stdout.decode())

    def stop_container(self, container: str) -> None:
        self._runtime.StopContainer(
            cri_pb2.StopContainerRequest(container_id=container, timeout=0), timeout=_CALL_S
        )

    def remove(self) -> None:
        """Ends all of its containers."""
        request: dict[str, Any] = {"pod_sandbox_id": self._sandbox}
        self._runtime.StopPodSandbox(cri_pb2.StopPodSandboxRequest(**request), timeout=_CALL_S)
        self._runtime.RemovePodSandbox(cri_pb2.RemovePodSandboxRequest(**request), timeout=_CALL_S)
