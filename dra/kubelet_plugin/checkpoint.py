"""What is prepared on this node, on disk: for all plugins of the driver that ever run on it.

During a rolling update two run at once, and the new one unprepares what the old one prepared.
"""

from __future__ import annotations

from typing import Final

from pydantic import BaseModel, ConfigDict, Field

from hymcache.dra.kubelet_plugin.prepared_device import PreparedDevice
from hymcache.dra.state_file import StateDocument

# In the plugin's folder of the kubelet, next to its socket.
CHECKPOINT_FILE: Final = "checkpoint.json"


class ClaimRecord(BaseModel):
    """A prepared claim, and what the kubelet was told."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    namespace: str
    name: str
    devices: tuple[PreparedDevice, ...]


class Checkpoint(StateDocument):
    """Prepared claims by UID."""

    claims: dict[str, ClaimRecord] = Field(default_factory=dict)
