"""The services that the kubelet calls."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final

from hymcache.dra.kubelet_plugin import (
    health_pb2,
    health_pb2_grpc,
    plugin_pb2,
    plugin_pb2_grpc,
    registration_pb2,
    registration_pb2_grpc,
)
from hymcache.dra.kubelet_plugin.device_health import TIMEOUT_S, DeviceHealth, DeviceReport
from hymcache.dra.kubelet_plugin.prepared_device import PreparedDevice
from hymcache.dra.kubelet_plugin.preparer import ClaimName, ClaimPreparer
from hymcache.errors import HymcacheError

PLUGIN_TYPE: Final = "DRAPlugin"
# What the socket serves, in the words of the kubelet.
SUPPORTED_VERSIONS: Final = ("v1.DRAPlugin", "v1alpha1.DRAResourceHealth")

logger = logging.getLogger("hymcache.dra.kubelet_plugin")


class RegistrationServicer(registration_pb2_grpc.RegistrationServicer):
    """Tells the kubelet where the plugin is."""

    def __init__(self, driver: str, endpoint: Path) -> None:
        self._driver = driver
        self._endpoint = endpoint
        self.is_registered = False

    async def GetInfo(
        self, request: registration_pb2.InfoRequest, context: Any
    ) -> registration_pb2.PluginInfo:
        """See registration.proto."""
        return registration_pb2.PluginInfo(
            type=PLUGIN_TYPE,
            name=self._driver,
            endpoint=str(self._endpoint),
            supported_versions=SUPPORTED_VERSIONS,
        )

    async def NotifyRegistrationStatus(
        self, request: registration_pb2.RegistrationStatus, context: Any
    ) -> registration_pb2.RegistrationStatusResponse:
        """See registration.proto."""
        self.is_registered = request.plugin_registered
        if request.plugin_registered:
            logger.info("the kubelet has registered the plugin")
        else:
            logger.error("the kubelet refuses the plugin: %s", request.error)
        return registration_pb2.RegistrationStatusResponse()


class PluginServicer(plugin_pb2_grpc.DRAPluginServicer):
    """Prepares and unprepares claims. Each claim has its own answer: one does not fail others."""

    def __init__(self, preparer: ClaimPreparer) -> None:
        self._preparer = preparer

    async def NodePrepareResources(
        self, request: plugin_pb2.NodePrepareResourcesRequest, context: Any
    ) -> plugin_pb2.NodePrepareResourcesResponse:
        """See plugin.proto."""
        left_s: float | None = context.time_remaining()
        answers = await asyncio.gather(
            *(self._prepare(_name(claim), left_s) for claim in request.claims)
        )
        uids = (claim.uid for claim in request.claims)
        return plugin_pb2.NodePrepareResourcesResponse(claims=dict(zip(uids, answers, strict=True)))

    async def NodeUnprepareResources(
        self, request: plugin_pb2.NodeUnprepareResourcesRequest, context: Any
    ) -> plugin_pb2.NodeUnprepareResourcesResponse:
        """See plugin.proto."""
        answers = {claim.uid: await self._unprepare(_name(claim)) for claim in request.claims}
        return plugin_pb2.NodeUnprepareResourcesResponse(claims=answers)

    async def _prepare(
        self, claim: ClaimName, left_s: float | None
    ) -> plugin_pb2.NodePrepareResourceResponse:
        try:
            devices = await self._preparer.prepare(claim, left_s)
        except HymcacheError as error:
            logger.warning("claim %s (%s) is not prepared: %s", claim, claim.uid, error)
            return plugin_pb2.NodePrepareResourceResponse(error=str(error))
        return plugin_pb2.NodePrepareResourceResponse(devices=[_device(d) for d in devices])

    async def _unprepare(self, claim: ClaimName) -> plugin_pb2.NodeUnprepareResourceResponse:
        try:
            await self._preparer.unprepare(claim)
        except HymcacheError as error:
            logger.warning("claim %s (%s) is not unprepared: %s", claim, claim.uid, error)
            return plugin_pb2.NodeUnprepareResourceResponse(error=str(error))
        return plugin_pb2.NodeUnprepareResourceResponse()


class HealthServicer(health_pb2_grpc.DRAResourceHealthServicer):
    """Streams the health of devices in use."""

    def __init__(self, health: DeviceHealth) -> None:
        self._health = health

    async def NodeWatchResources(
        self, request: health_pb2.NodeWatchResourcesRequest, context: Any
    ) -> AsyncIterator[health_pb2.NodeWatchResourcesResponse]:
        """See health.proto."""
        async for reports in self._health.follow():
            yield health_pb2.NodeWatchResourcesResponse(devices=[_health(r) for r in reports])


def _name(claim: plugin_pb2.Claim) -> ClaimName:
    return ClaimName(claim.namespace, claim.name, claim.uid)


def _device(device: PreparedDevice) -> plugin_pb2.Device:
    return plugin_pb2.Device(
        request_names=[device.request],
        pool_name=device.pool,
        device_name=device.device,
        cdi_device_ids=device.cdi_names,
        share_id=device.share_id or None,
    )


def _health(report: DeviceReport) -> health_pb2.DeviceHealth:
    return health_pb2.DeviceHealth(
        device=health_pb2.DeviceIdentifier(pool_name=report.pool, device_name=report.device),
        health=health_pb2.UNHEALTHY if report.fault else health_pb2.HEALTHY,
        last_updated_time=report.updated_s,
        health_check_timeout_seconds=TIMEOUT_S,
        message=report.fault or "",
    )
