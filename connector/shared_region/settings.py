"""What a user sets for a shared region, beside what vLLM's own OffloadingConnector takes.

The device and its size come from `kv_connector_extra_config`, else from the environment of a pod
that a region was injected into: `CXL_DAX_DEVICE` and `CXL_DAX_SIZE`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Final

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from hymcache import limits
from hymcache.config import DurationS, Size
from hymcache.config_source import parse_section
from hymcache.errors import ConfigError

ORIGIN: Final = "kv_connector_extra_config"
DEVICE_VARIABLE: Final = "CXL_DAX_DEVICE"
SIZE_VARIABLE: Final = "CXL_DAX_SIZE"

# What OffloadingConnector reads from the same dictionary.
_KEYS_OF_VLLM: Final = frozenset(
    {
        "spec_name",
        "spec_module_path",
        "block_size",
        "blocks_per_chunk",
        "offload_prompt_only",
        "self_describing_kv_events",
        "canonical_layout",
    }
)
_THREADS_MAX: Final = 64


class Role(StrEnum):
    """What an engine does with the region; the names are vLLM's of `kv_role`."""

    BOTH = "kv_both"
    PRODUCER = "kv_producer"
    CONSUMER = "kv_consumer"

    @property
    def loads(self) -> bool:
        """Whether it takes KV from the region."""
        return self is not Role.PRODUCER

    @property
    def stores(self) -> bool:
        """Whether it puts KV into the region."""
        return self is not Role.CONSUMER


def _role(value: object) -> object:
    if isinstance(value, str) and value not in set(Role):
        raise ValueError(f"not a role; write {', '.join(Role)}")
    return value


class RegionSettings(BaseModel):
    """The settings of one engine. The keys are those of `kv_connector_extra_config`."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)

    device: Path = Field(
        description="The device-dax, or a file (one on /dev/shm is memory); "
        "default: `CXL_DAX_DEVICE`."
    )
    size: Size = Field(
        0,
        description="Bytes of the region; a file is made that large. 0: all that the device has. "
        "Default: `CXL_DAX_SIZE`.",
    )
    offset: Size = Field(0, description="Where on the device the region begins.")
    slot_bytes: Size = Field(
        0, description="Bytes of a slot; 0: one block of one rank, as this engine has it."
    )
    prefault: bool | None = Field(
        None,
        description="Map all pages at the start, not at the first use of each. Default: for a "
        "device-dax; a file is mapped at its first use, which starts faster.",
    )
    durable: bool = Field(
        False, description="Write each block to a file's disk before others can find it."
    )
    verify_checksums: bool = Field(True, description="Check the crc32c of what was loaded.")
    role: Annotated[Role, BeforeValidator(_role)] = Field(
        Role.BOTH, description="`kv_both`, `kv_producer` (stores only), `kv_consumer` (loads only)."
    )
    handoff_timeout_s: DurationS = Field(
        2.0,
        ge=0,
        le=600,
        description="How long a request whose prompt another engine prefills waits for its KV.",
    )
    deadline_s: DurationS = Field(
        limits.LOAD_DEADLINE_S,
        gt=0,
        le=3600,
        description="The longest that a load or a store may take.",
    )
    load_threads: int = Field(2, ge=1, le=_THREADS_MAX, description="Threads that load blocks.")
    store_threads: int = Field(1, ge=1, le=_THREADS_MAX, description="Threads that store blocks.")
    staging_bytes: Size = Field(
        limits.STAGING_BUFFER_BYTES,
        ge=limits.MIB,
        description="Pinned host memory between the region and a GPU; not used on a CPU.",
    )
    variant: str = Field(
        "", max_length=256, description="Engines with different values share nothing."
    )


def read_settings(
    extra: Mapping[str, Any], *, environ: Mapping[str, str] | None = None
) -> RegionSettings:
    """The settings from vLLM's `kv_connector_extra_config` and the environment.

    Raises ConfigError, one line a fault, for an unknown key (it names the near one) or a value
    that cannot be.
    """
    environ = os.environ if environ is None else environ
    if extra.get("canonical_layout"):
        raise ConfigError(
            f"{ORIGIN}: canonical_layout: a shared region keeps blocks as the engine has them; "
            "remove the key"
        )
    given = {key: value for key, value in extra.items() if key not in _KEYS_OF_VLLM}
    if "device" not in given:
        device = environ.get(DEVICE_VARIABLE)
        if not device:
            raise ConfigError(
                f"{ORIGIN}: device: no region is named; write the path of a device or file, or "
                f"set {DEVICE_VARIABLE}"
            )
        given["device"] = device
        # The size of one device says nothing of another one.
        if "size" not in given and environ.get(SIZE_VARIABLE):
            given["size"] = environ[SIZE_VARIABLE]
    return parse_section(RegionSettings, given, ORIGIN)
