from __future__ import annotations

import errno
import pickle

import pytest

import hymcache
from hymcache import errors


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
