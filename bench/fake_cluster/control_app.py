"""How tests break the API server: a second HTTP port that works while the first does not."""

from __future__ import annotations

import asyncio

from aiohttp import web

from hymcache.bench.fake_cluster.faults import Faults
from hymcache.bench.fake_cluster.http_app import ApiServer
from hymcache.bench.fake_cluster.listener import OutageListener


def make_control_app(api: ApiServer, faults: Faults, front: OutageListener) -> web.Application:
    """POST /faults, /drop-watches, /expire, /away; GET /requested."""
    background: set[asyncio.Task[None]] = set()

    async def set_faults(request: web.Request) -> web.Response:
        body = await request.json()
        faults.delay_s = float(body.get("delay_s", 0.0))
        faults.refusals = [(str(part), int(code)) for part, code in body.get("refusals", [])]
        return web.json_response({})

    async def drop_watches(_request: web.Request) -> web.Response:
        return web.json_response({"dropped": api.store.end_watches()})

    async def expire(request: web.Request) -> web.Response:
        # Real servers say that a version is gone by the status, or by an event after a 200.
        api.errors_in_stream = bool((await request.json()).get("in_stream", False))
        api.store.compact()
        return web.json_response({"dropped": api.store.end_watches()})

    async def away(request: web.Request) -> web.Response:
        seconds = float((await request.json())["seconds"])
        await front.stop()

        async def come_back() -> None:
            await asyncio.sleep(seconds)
            await front.start()

        task = asyncio.create_task(come_back())
        background.add(task)
        task.add_done_callback(background.discard)
        return web.json_response({})

    async def requested(_request: web.Request) -> web.Response:
        return web.json_response(sorted(api.requested))

    app = web.Application()
    app.router.add_post("/faults", set_faults)
    app.router.add_post("/drop-watches", drop_watches)
    app.router.add_post("/expire", expire)
    app.router.add_post("/away", away)
    app.router.add_get("/requested", requested)
    return app
