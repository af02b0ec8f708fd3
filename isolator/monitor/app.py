"""The monitor's HTTP: /metrics, /healthz, /readyz."""

from __future__ import annotations

from typing import Annotated

from fastapi import FastAPI, Header, Response
from fastapi.responses import PlainTextResponse
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from isolator import names


def create_app(registry: CollectorRegistry) -> FastAPI:
    """An app that serves the registry's series in the format that the client asks for.

    Ready as soon as it serves: neither NVML, a cache, nor the API server has to be there, and each of
    them says in a series of its own whether it is.
    """
    app = FastAPI(title="kai-resource-isolator monitor", docs_url=None, redoc_url=None, openapi_url=None)

    # Not async: the scan reads files, and one thread of the pool may wait for it while probes are answered.
    @app.get(names.METRICS_PATH)
    def metrics(accept: Annotated[str, Header()] = "") -> Response:
        try:
            encode, content_type = choose_encoder(accept)
        except (TypeError, ValueError):  # the client names a version that is none
            encode, content_type = choose_encoder("")
        return Response(encode(registry), headers={"Content-Type": content_type})

    @app.get(names.HEALTH_PATH)
    async def health() -> PlainTextResponse:
        return PlainTextResponse("ok\n")

    @app.get(names.READY_PATH)
    async def ready() -> PlainTextResponse:
        return PlainTextResponse("ok\n")

    return app
