"""The monitor's HTTP: /metrics, /status.json, the page at /, /healthz, /readyz."""

from __future__ import annotations

from typing import Annotated, Final

from fastapi import FastAPI, Header, Query, Response
from fastapi.responses import PlainTextResponse
from prometheus_client import CollectorRegistry

from isolator import names
from isolator.monitor.exposition import Exposition
from isolator.monitor.page import Status, headers
from isolator.monitor.shared import SharedScan

_READ: Final = ["GET", "HEAD"]


def _status(app: FastAPI, scan: SharedScan) -> None:
    """The node's status document, as JSON and as a page."""
    status = Status(scan)

    @app.api_route(names.STATUS_PATH, methods=_READ)
    def document() -> Response:
        return Response(status.json(), media_type="application/json", headers={"Cache-Control": "no-store"})

    @app.api_route("/", methods=_READ)
    def page(refresh: Annotated[int | None, Query(ge=1, le=3600)] = None) -> Response:
        more = {} if refresh is None else {"Refresh": str(refresh)}
        return Response(status.page(), media_type="text/html", headers=headers() | more)


def create_app(registry: CollectorRegistry, scan: SharedScan | None = None) -> FastAPI:
    """An app that serves the registry's series in the format that the client asks for, and the node's status
    where there is a scan to make it from.

    Ready as soon as it serves: neither NVML, a cache, nor the API server has to be there, and each of
    them says in a series of its own whether it is.
    """
    app = FastAPI(title="kai-resource-isolator monitor", docs_url=None, redoc_url=None, openapi_url=None)
    exposition = Exposition(registry)

    # Not async: the scan reads files, and one thread of the pool may wait for it while probes are answered.
    @app.api_route(names.METRICS_PATH, methods=_READ)
    def metrics(accept: Annotated[str, Header()] = "") -> Response:
        text, content_type = exposition.answer(accept)
        return Response(text, headers={"Content-Type": content_type})

    @app.api_route(names.HEALTH_PATH, methods=_READ)
    async def health() -> PlainTextResponse:
        return PlainTextResponse("ok\n")

    @app.api_route(names.READY_PATH, methods=_READ)
    async def ready() -> PlainTextResponse:
        return PlainTextResponse("ok\n")

    if scan is not None:
        _status(app, scan)
    return app
