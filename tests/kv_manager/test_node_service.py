"""A storage node from its configuration."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from hymcache import Client
from hymcache.config import Config
from hymcache.config_source import load_config
from hymcache.errors import ConfigError, DeviceError, Unavailable
from hymcache.kv_manager import NodeService, node_id
from hymcache.lookup import BlockStatus
from hymcache.master import MasterService
from tests.lookup.small_service import eventually, wait_found

MakeConfig = Callable[..., Config]


@pytest.fixture
def make_config(tmp_path: Path) -> MakeConfig:
    """A configuration with these settings beside those that a test needs."""

    def make(*settings: str) -> Config:
        beside = (
            "master.listen=127.0.0.1:0",
            "master.grpc=",
            "master.http=",
            "node.listen=127.0.0.1:0",
            "node.http=",
            "node.name=n1",
            f"node.unix={tmp_path}/made/n1.sock",
            f"device.path={tmp_path}/made/n1.device",
            "device.capacity=16MiB",
            "device.staging=4MiB",
            "device.write_buffer=4MiB",
            "device.preallocate=false",
        )
        return load_config(environ={}, settings=(*beside, *settings))

    return make


def test_it_serves_between_start_and_stop(make_config: MakeConfig, tmp_path: Path) -> None:
    with MasterService(make_config()) as master:
        address = master.endpoints["master.listen"]
        service = NodeService(make_config(f"node.masters={address}"))
        with pytest.raises(Unavailable, match="the node is not running"):
            service.stats()
        with service, Client(address) as client:
            assert service.endpoints["node.unix"] == f"{tmp_path}/made/n1.sock"
            eventually(lambda: service.stats()["masters"][0]["state"] == "live")
            assert client.put([b"k" * 16], [b"bytes"]) == [BlockStatus.OK]
            wait_found(client, [b"k" * 16])
            (location,) = client.lookup([b"k" * 16])
            assert location is not None
            assert location.node == node_id("n1")
            stats = service.stats()
            assert (stats["objects"], stats["object_bytes"]) == (1, 5)
            assert stats["device_capacity_bytes"] == 16 << 20
            service.set_draining(True)
            assert client.put([b"l" * 16], [b"bytes"]) == [BlockStatus.SKIP_DRAINING]
            assert service.stats()["writes_refused"]["draining"] == 1
        service.stop()  # a second time
        with pytest.raises(Unavailable):
            service.endpoints  # noqa: B018 - the property is what is tested


def test_it_can_start_again(make_config: MakeConfig) -> None:
    service = NodeService(make_config("node.masters=127.0.0.1:1"))
    for _ in range(2):
        with service:
            assert service.stats()["objects"] == 0


def test_a_device_in_use_is_named(make_config: MakeConfig) -> None:
    with NodeService(make_config()):
        other = NodeService(make_config("node.name=n2", "node.unix=/tmp/hymcache-other.sock"))
        with pytest.raises((ConfigError, DeviceError), match=r"n1\.device") as raised:
            other.start()
    assert "\n" not in str(raised.value)


def test_a_folder_that_cannot_be_made_is_named(make_config: MakeConfig, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"^device\.path = .*cannot make its folder"):
        NodeService(make_config(f"device.path={tmp_path}/file/n1.device")).start()


def test_what_masters_cannot_be_told_is_refused(make_config: MakeConfig) -> None:
    with pytest.raises(ConfigError, match="at most 63"):
        NodeService(make_config(f"node.advertise={'h' * 63}")).start()


def test_a_disk_that_is_not_there_gets_no_file_in_its_place(make_config: MakeConfig) -> None:
    with pytest.raises(ConfigError, match=r"there is no device /dev/nvme9n9; `lsblk` lists"):
        NodeService(make_config("device.path=/dev/nvme9n9")).start()
    assert not Path("/dev/nvme9n9").exists()


def test_of_a_long_path_that_is_not_there_nothing_is_made(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"^device\.path = .*No such file or directory"):
        NodeService(make_config(f"device.path={tmp_path}/a/b/c/n1.device")).start()
    assert not (tmp_path / "a").exists()


def test_masters_that_cannot_be_had_are_warned_of(
    make_config: MakeConfig, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def warnings() -> str:
        return "\n".join(r.getMessage() for r in caplog.records if r.levelname == "WARNING")

    with MasterService(make_config()) as master:
        address = master.endpoints["master.listen"]
        with NodeService(make_config(f"node.masters={address}")):
            assert not warnings()
            twin = make_config(
                f"node.masters={address}",
                f"node.unix={tmp_path}/made/n2.sock",
                f"device.path={tmp_path}/made/n2.device",
            )
            with NodeService(twin):
                eventually(lambda: "give each node its own node.name" in warnings())
    caplog.clear()
    with NodeService(make_config(f"node.masters={address}")):
        eventually(lambda: f"cannot connect to {address}" in warnings())


def test_ids_come_from_names() -> None:
    assert node_id("n1") == node_id("n1")
    assert node_id("n1") != node_id("n2")
    assert 0 < node_id("") < 1 << 32


def test_once_started_it_can_be_used(make_config: MakeConfig) -> None:
    with MasterService(make_config()) as master:
        address = master.endpoints["master.listen"]
        with Client(address) as early:
            assert early.put([b"k" * 16], [b"bytes"]) == [BlockStatus.UNAVAILABLE]
            service = NodeService(make_config(f"node.masters={address}"))
            with service, Client(address) as newcomer:
                assert newcomer.put([b"k" * 16], [b"bytes"]) == [BlockStatus.OK]
                eventually(lambda: early.put([b"l" * 16], [b"bytes"]) == [BlockStatus.OK])
