"""What the controller is told at its start."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from hymcache.dra import names
from hymcache.dra.retry import Backoff
from hymcache.errors import ConfigError

# Nothing polls more often: what changes in the cluster comes by watches.
PERIOD_S_MIN: Final = 10.0


@dataclass(frozen=True, kw_only=True)
class LeaseTimes:
    """How leadership is kept, as client-go does by default."""

    duration_s: float = 15.0
    renew_deadline_s: float = 10.0
    retry_s: float = 2.0

    def __post_init__(self) -> None:
        if not self.retry_s < self.renew_deadline_s < self.duration_s:
            raise ConfigError(
                f"lease: retry {self.retry_s:g} s < renew deadline {self.renew_deadline_s:g} s "
                f"< duration {self.duration_s:g} s does not hold"
            )


@dataclass(frozen=True, kw_only=True)
class ControllerSettings:
    """The controller's configuration.

    namespace          where the ledger, the lease and events about no claim are kept
    identity           this process among several, e.g. its pod's name
    fabric_period_s    how often blades are looked at: nothing tells of a power cycle
    consumer_wait_s    how long a claim waits for its pods' nodes before any host will do
    attach_deadline_s  how long a host's agent may be away before the pod is sent elsewhere
    quarantine_s       how long no new pods are sent to such a host
    stuck_after_s      after which time of failing a blade that cannot free memory is tainted
    late_compose_s     how long after an attempt to compose that got no answer its region may still
                       come: longer than the fabric manager is waited for
    orphan_grace_s     how long a region that no claim has is left alone
    exclusive          whether all regions on the blades are this driver's to collect, those
                       without an owner included (the public dialect knows no owners)
    fence_after_s      when to end processes that hold a device of a region that is to be freed;
                       None: never
    give_up_after_s    when to let a claim go whose memory cannot be freed; None: never
    compat_devices     devices of a blade where the API server counts no capacity: each has one
                       claim at a time
    default_qos        channels that a region is spread over where a claim does not say; None:
                       as many as its size allows and the blade has room on
    default_request_mib  size where a claim asks for none
    """

    namespace: str
    identity: str
    driver: str = names.DRIVER_NAME
    cluster: str = ""
    fabric_period_s: float = 30.0
    consumer_wait_s: float = 30.0
    attach_deadline_s: float = 30.0
    quarantine_s: float = 60.0
    stuck_after_s: float = 300.0
    late_compose_s: float = 135.0
    orphan_grace_s: float = 60.0
    exclusive: bool = False
    fence_after_s: float | None = None
    give_up_after_s: float | None = None
    compat_devices: int = 16
    default_qos: int | None = None
    default_request_mib: int = 1024
    workers: int = 16
    lease: LeaseTimes = field(default_factory=LeaseTimes)
    backoff: Backoff = field(
        default_factory=lambda: Backoff(first_s=0.5, factor=2.0, longest_s=60.0, jitter=0.5)
    )

    def __post_init__(self) -> None:
        if self.fabric_period_s < PERIOD_S_MIN:
            raise ConfigError(
                f"fabric period = {self.fabric_period_s:g} s: at least {PERIOD_S_MIN:g} s"
            )
        if not 1 <= self.compat_devices <= 128:
            raise ConfigError(f"compat devices = {self.compat_devices}: 1 to 128 in a slice")
        if self.default_qos not in (None, 1, 2, 4, 8):
            raise ConfigError(f"default QoS = {self.default_qos}: write 1, 2, 4 or 8")

    @property
    def field_manager(self) -> str:
        """Who applies the controller's fields; the kubelet plugin has another name."""
        return f"{self.driver}/controller"

    @property
    def owner(self) -> str:
        """What the owner annotation of a claim says: this installation, whichever replica leads."""
        return f"{self.driver}/controller"
