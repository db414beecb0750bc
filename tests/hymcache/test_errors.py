from __future__ import annotations

import errno
import pickle
from pathlib import Path

import pytest

import hymcache
from hymcache import errors
from hymcache.config_source import load_config
from hymcache.kv_manager import NodeService


@pytest.mark.parametrize(
    "kind",
    [
        errors.ConfigError,
        errors.DeviceError,
        errors.Unavailable,
        errors.Corrupt,
        errors.ProtocolError,
    ],
)
def test_every_error_is_exported_and_is_a_hymcache_error(kind: type[Exception]) -> None:
    assert issubclass(kind, hymcache.HymcacheError)
    assert getattr(hymcache, kind.__name__) is kind


def test_device_error_keeps_its_errno_between_processes() -> None:
    error = pickle.loads(pickle.dumps(errors.DeviceError("disk full", errno.ENOSPC)))
    assert isinstance(error, errors.DeviceError)
    assert (str(error), error.errno) == ("disk full", errno.ENOSPC)


def test_an_unknown_attribute_of_the_package_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="Cleint"):
        _ = hymcache.Cleint


def test_the_core_raises_the_same_classes(tmp_path: Path) -> None:
    with pytest.raises(errors.ConfigError, match="nowhere"):
        hymcache.Client("nowhere")
    with hymcache.Client("127.0.0.1:1") as client, pytest.raises(errors.Unavailable):
        client.lookup([b"k" * 16])
    path = tmp_path / ("long" * 100)
    settings = [
        f"device.path={path}",
        f"node.unix={tmp_path}/node.sock",
        "node.listen=127.0.0.1:0",
        "device.capacity=16MiB",
        "device.write_buffer=4MiB",
        "device.staging=4MiB",
    ]
    node = NodeService(load_config(environ={}, settings=settings))
    with pytest.raises(errors.DeviceError, match=str(path)) as caught:
        node.start()
    assert caught.value.errno == errno.ENAMETOOLONG
