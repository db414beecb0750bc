"""What goes wrong, as Redfish tells it: a status, a message id of the base registry, one line."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_pascal
from starlette.exceptions import HTTPException

from hymcache.dra.host_agent.resources import DaxConflict, Holder
from hymcache.errors import ConfigError, DeviceError, HymcacheError, Unavailable

_REGISTRY: Final = "Base.1.15"
_HOLDERS_TOLD_MAX: Final = 3
# The first that an error is an instance of.
_REFUSALS: Final[tuple[tuple[type[Exception], int, str], ...]] = (
    (DaxConflict, 409, "ResourceAlreadyExists"),
    (ConfigError, 400, "PropertyValueError"),
    (Unavailable, 503, "ServiceTemporarilyUnavailable"),
    (DeviceError, 500, "OperationFailed"),
    (HymcacheError, 500, "InternalError"),
)


class MessageBody(BaseModel):
    """One of an error's messages; `Oem` is what our own clients read."""

    model_config = ConfigDict(alias_generator=to_pascal, populate_by_name=True)

    message_id: str
    message: str
    message_severity: str
    oem: dict[str, Any] | None = None


class ErrorContent(BaseModel):
    """What `error` of an answer has."""

    code: str
    message: str
    extended_info: list[MessageBody] = Field(alias="@Message.ExtendedInfo")


class ErrorBody(BaseModel):
    """An answer that is not a success."""

    error: ErrorContent


# For the OpenAPI page: what any operation may answer.
ERROR_RESPONSES: Final[dict[int | str, dict[str, Any]]] = {
    status: {"model": ErrorBody} for status in (400, 401, 404, 409, 413, 500, 503)
}


class Refused(Exception):
    """An answer that is not a success. `oem` is what our own clients read."""

    def __init__(
        self, status: int, message: str, message_id: str, oem: dict[str, Any] | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message_id = message_id
        self.oem = oem


def held(allocation_id: str, holders: Sequence[Holder]) -> Refused:
    """The device is not taken away: these hold it."""
    told = ", ".join(str(holder) for holder in holders[:_HOLDERS_TOLD_MAX])
    untold = len(holders) - _HOLDERS_TOLD_MAX
    more = f" and {untold} more" if untold > 0 else ""
    return Refused(
        409,
        f"{allocation_id}: held by {told}{more}; end them, or ask with Fence",
        "ResourceInUse",
        {"Holders": [holder.model_dump(mode="json", by_alias=True) for holder in holders]},
    )


def tell_errors(app: FastAPI) -> None:
    """Has the application answer errors so."""

    async def tell(_request: Request, error: Exception) -> JSONResponse:
        refused = error if isinstance(error, Refused) else _refusal(error)
        headers = dict(getattr(error, "headers", None) or {})
        if refused.status == 503:
            headers["Retry-After"] = "5"
        return JSONResponse(_body(refused), refused.status, headers)

    for kind in (Refused, HymcacheError, RequestValidationError, HTTPException):
        app.add_exception_handler(kind, tell)


def _refusal(error: Exception) -> Refused:
    if isinstance(error, RequestValidationError):
        fault = error.errors()[0]
        where = ".".join(str(part) for part in fault["loc"] if part != "body") or "body"
        return Refused(400, f"{where}: {fault['msg']}", "PropertyValueError")
    if isinstance(error, HTTPException):
        return Refused(error.status_code, str(error.detail), "GeneralError")
    for kind, status, message_id in _REFUSALS:
        if isinstance(error, kind):
            return Refused(status, str(error), message_id)
    return Refused(500, str(error), "InternalError")


def _body(refused: Refused) -> dict[str, Any]:
    message_id = f"{_REGISTRY}.{refused.message_id}"
    message = MessageBody(
        message_id=message_id,
        message=str(refused),
        message_severity="Warning" if refused.status < 500 else "Critical",
        oem=None if refused.oem is None else {"CxlHost": refused.oem},
    )
    told = message.model_dump(mode="json", by_alias=True, exclude_none=True)
    return {"error": {"code": message_id, "message": str(refused), "@Message.ExtendedInfo": [told]}}
