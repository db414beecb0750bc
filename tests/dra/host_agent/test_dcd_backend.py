"""Dynamic capacity: a clear no, on kernels without it and on those with an unreleased form."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest

from hymcache.dra.host_agent.backend import PhysicalRange
from hymcache.dra.host_agent.dcd_backend import DcdBackend
from hymcache.dra.host_agent.sysfs import KernelSysfs
from hymcache.errors import ConfigError


@pytest.mark.parametrize(
    ("attribute", "told"),
    [
        ("create_ram_region", "lacks it"),
        ("create_dc_region", "has it in a form that no release defines"),
        ("create_dynamic_ram_a_region", "has it in a form that no release defines"),
    ],
)
def test_it_says_what_is_missing_and_what_to_use(tmp_path: Path, attribute: str, told: str) -> None:
    decoder = tmp_path / "bus/cxl/devices/decoder0.0"
    decoder.mkdir(parents=True)
    (decoder / attribute).touch()
    backend = DcdBackend(KernelSysfs(tmp_path))
    for call in (backend.check, lambda: backend.create("a", PhysicalRange(0, 1 << 21))):
        with pytest.raises(ConfigError) as caught:
            call()
        assert "not supported by this kernel" in str(caught.value)
        assert f"{platform.release()} {told}; use --backend sysfs" in str(caught.value)
