"""Faults of the simulated fabric manager: what a request meets instead of a good answer."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from typing import Annotated, Final, Literal

from pydantic import Field, StrictBool, StrictFloat
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hymcache.dra.fabric.models import API_ROOT, WHOLE, Body, ErrorBody, StatusBody
from hymcache.dra.simulator.refusal import Refusal, conflict

_FAULTS_MAX: Final = 256


class FaultBody(Body):
    """What happens to the next `times` requests of a method to paths that contain `pathPart`.

    They wait for `delayS`; then `status` is answered, or with `drop` the connection ends without
    an answer. With `after` the request is carried out before: its answer is late, or lost.
    """

    method: Literal["GET", "POST", "PUT", "PATCH", "DELETE", "*"] = "*"
    path_part: Annotated[str, Field(max_length=256)] = ""
    times: Annotated[int, Field(ge=1, le=100_000), WHOLE] = 1
    delay_s: Annotated[StrictFloat, Field(ge=0, le=600)] = 0.0
    status: Annotated[int, Field(ge=400, le=599), WHOLE] | None = None
    drop: StrictBool = False
    after: StrictBool = False


@dataclass
class _Fault:
    body: FaultBody
    left: int


class Faults:
    """Faults that are to come, in order: a request meets the first that fits it."""

    def __init__(self) -> None:
        self._faults: list[_Fault] = []

    def add(self, body: FaultBody) -> None:
        """One more. Refuses where there are many already."""
        if len(self._faults) >= _FAULTS_MAX:
            raise conflict(f"there are {_FAULTS_MAX} faults already; DELETE them first")
        self._faults.append(_Fault(body, body.times))

    def clear(self) -> None:
        """None are to come."""
        self._faults.clear()

    def pending(self) -> list[FaultBody]:
        """Those to come, with the times that are left."""
        return [f.body.model_copy(update={"times": f.left}) for f in self._faults]

    def take(self, method: str, path: str) -> FaultBody | None:
        """The fault that a request meets, counted."""
        for fault in self._faults:
            if fault.body.method in {"*", method} and fault.body.path_part in path:
                fault.left -= 1
                if fault.left == 0:
                    self._faults.remove(fault)
                return fault.body
        return None


class FaultInjection:
    """Middleware in front of the fabric manager's API; other paths meet no faults."""

    def __init__(self, app: ASGIApp, faults: Faults) -> None:
        self._app = app
        self._faults = faults

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        fault = None
        if scope["type"] == "http" and scope["path"].startswith(API_ROOT):
            fault = self._faults.take(scope["method"], scope["path"])
        if fault is None:
            await self._app(scope, receive, send)
            return
        # It has been read by now: what is late is carried out although nobody waits for it.
        receive = await _read(receive)
        answer: list[Message] = []
        if fault.after:
            await self._app(scope, receive, _keep_in(answer))
        await asyncio.sleep(fault.delay_s)
        if fault.status is None and not fault.drop:
            if not fault.after:
                await self._app(scope, receive, send)
            for message in answer:
                await send(message)
            return
        if fault.drop:
            # The server ends a connection whose answer is shorter than it says.
            await send(_start(200, 1))
            await send({"type": "http.response.body", "body": b""})
            return
        status = fault.status or 500
        refusal = Refusal(status, "Injected fault", "a fault was asked for")
        body = json.dumps(error_body(refusal, scope["path"]).to_json()).encode()
        await send(_start(status, len(body)))
        await send({"type": "http.response.body", "body": body})


def error_body(refusal: Refusal, uri: str) -> ErrorBody:
    """The body of a refusal's answer."""
    status = StatusBody(code=refusal.status, message=refusal.message)
    return ErrorBody(uri=uri, details=refusal.details, status=status)


async def _read(receive: Receive) -> Receive:
    """The whole request, to be received again."""
    messages = [await receive()]
    while messages[-1]["type"] == "http.request" and messages[-1].get("more_body"):
        messages.append(await receive())

    async def again() -> Message:
        return messages.pop(0) if messages else await receive()

    return again


def _keep_in(messages: list[Message]) -> Send:
    async def keep(message: Message) -> None:
        messages.append(message)

    return keep


def _start(status: int, length: int) -> Message:
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % length)]
    return {"type": "http.response.start", "status": status, "headers": headers}
