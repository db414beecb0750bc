"""What all routes of the simulated fabric manager have in common: names, statuses, errors."""

from __future__ import annotations

from collections.abc import Callable
from http import HTTPStatus
from typing import Annotated, Any, Final

from fastapi import APIRouter, FastAPI, Path, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException

from hymcache.dra.fabric.models import ErrorBody, ResourceName
from hymcache.dra.simulator.faults import error_body
from hymcache.dra.simulator.refusal import Refusal, bad_request
from hymcache.errors import HymcacheError

ApplianceName = Annotated[ResourceName, Path(alias="applianceId", examples=["appliance-0"])]
BladeName = Annotated[ResourceName, Path(alias="bladeId", examples=["blade-0"])]
HostName = Annotated[ResourceName, Path(alias="hostId", examples=["node-1"])]
PortName = Annotated[ResourceName, Path(alias="portId", examples=["port-0"])]
RegionName = Annotated[ResourceName, Path(alias="memoryId", examples=["memory-0"])]
BlockName = Annotated[ResourceName, Path(alias="resourceId", examples=["channel-0-block-0"])]
NewApplianceName = Annotated[ResourceName, Query(alias="newApplianceId")]
NewBladeName = Annotated[ResourceName, Query(alias="newBladeId")]
NewHostName = Annotated[ResourceName, Query(alias="newHostId")]
Fence = Annotated[bool, Query(description="End who holds the devices (not in the public API).")]

PARTIAL: Final = HTTPStatus.PARTIAL_CONTENT
# "4XX" stands for what the framework itself answers, such as 405; it also takes the place of the
# framework's 422, which cfm-service does not know.
ERRORS: Final[dict[int | str, dict[str, Any]]] = {
    400: {"model": ErrorBody, "description": "The request is wrong"},
    404: {"model": ErrorBody, "description": "There is no such thing"},
    409: {"model": ErrorBody, "description": "Not in this state"},
    "4XX": {"model": ErrorBody, "description": "Not answered"},
    500: {"model": ErrorBody, "description": "Something behind the service failed"},
}


class _Route(APIRoute):
    """Answers leave out what is not set, as cfm-service does."""

    def __init__(self, path: str, endpoint: Callable[..., Any], **arguments: Any) -> None:
        arguments["response_model_exclude_none"] = True
        super().__init__(path, endpoint, **arguments)


def make_router(tag: str) -> APIRouter:
    """A router whose routes have the errors of all, and are shown under a heading."""
    return APIRouter(tags=[tag], responses=ERRORS, route_class=_Route)


def or_partial(model: type[Any]) -> dict[int | str, dict[str, Any]]:
    """The errors, and 206 with the same body as success."""
    partial = {"model": model, "description": "Composed, but not all hosts have it"}
    return {**ERRORS, int(PARTIAL): partial}


def tell_errors(app: FastAPI) -> None:
    """Makes every refusal an answer as cfm-service gives it."""

    @app.exception_handler(Refusal)
    def refused(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, Refusal)  # noqa: S101 - the handler's type is the framework's
        return _answer(request, error)

    @app.exception_handler(HymcacheError)
    def failed(request: Request, error: Exception) -> JSONResponse:
        return _answer(request, Refusal(500, "Internal error", str(error)))

    @app.exception_handler(RequestValidationError)
    def invalid(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError)  # noqa: S101 - as above
        fault = error.errors()[0]
        key = ".".join(str(part) for part in fault["loc"][1:]) or str(fault["loc"][0])
        return _answer(request, bad_request(f"{key}: {fault['msg']}"))

    @app.exception_handler(HTTPException)
    def unknown(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)  # noqa: S101 - as above
        phrase = HTTPStatus(error.status_code).phrase
        answer = _answer(request, Refusal(error.status_code, phrase, str(error.detail)))
        answer.headers.update(error.headers or {})
        return answer


def _answer(request: Request, refusal: Refusal) -> JSONResponse:
    body = error_body(refusal, request.url.path)
    return JSONResponse(body.to_json(), status_code=refusal.status)
