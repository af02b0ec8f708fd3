"""HTTP: carries reviews to the rule and its answers back, and serves /healthz, /readyz and /metrics."""

from __future__ import annotations

import asyncio
import logging
import traceback
from collections import Counter
from collections.abc import Callable
from contextlib import AsyncExitStack
from time import perf_counter
from typing import Any, Final

from fastapi import FastAPI, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, PlainTextResponse

from isolator import names
from isolator.errors import ContractError
from isolator.webhook import review
from isolator.webhook.health import Health
from isolator.webhook.metrics import Metrics
from isolator.webhook.patch import build_patch as rule_build_patch
from isolator.webhook.rule import Rule, Verdict, decide_ephemeral
from isolator.webhook.rule import decide as rule_decide

log = logging.getLogger(__name__)

LARGE_BODY: Final = 256 << 10
"""Bytes from which bodies are read one at a time: the connections together must not take our memory."""
MOST_WAITING: Final = 64
"""Bodies that may be on their way at once. One more takes the place of the client's that has most, so that a
pod that sends slowly on many connections takes neither all of them nor our memory."""
PATIENCE: Final = 0.25
"""Seconds that a body has its place for certain: those of a burst of the API server's are there by then."""
BODY_SECONDS: Final = 10.0
"""A body may take this long to arrive; the API server gives up after 30 s at most."""
TURN_SECONDS: Final = 1.5
"""The rest of a large body, from its turn on: others wait for theirs."""

Decide = Callable[[dict[str, Any], str, Rule], Verdict]
BuildPatch = Callable[[dict[str, Any], Verdict, Rule], list[dict[str, Any]]]


class _Refused(Exception):
    """A request that gets an HTTP error instead of a review; the message is the body."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


async def _body(request: Request, large: AsyncExitStack, turn: asyncio.Lock) -> bytearray:
    """The body; a large one from its `turn` on, which `large` ends when the body is needed no more."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json" or request.headers.get("content-encoding", "identity") != "identity":
        raise _Refused(415, "send application/json, not compressed")
    too_large = _Refused(413, f"the body is larger than {review.MAX_BODY} bytes")
    announced = request.headers.get("content-length", "")
    if announced.isdigit() and int(announced) > review.MAX_BODY:
        raise too_large
    body, waited = bytearray(), False
    try:
        async with asyncio.timeout(BODY_SECONDS) as limit:
            async for chunk in request.stream():
                body += chunk
                if len(body) > review.MAX_BODY:
                    raise too_large
                if len(body) > LARGE_BODY and not waited:
                    waited = True
                    await large.enter_async_context(turn)
                    soon = asyncio.get_running_loop().time() + TURN_SECONDS
                    limit.reschedule(min(soon, limit.when() or soon))
    except ClientDisconnect as error:
        raise _Refused(400, "the client went away before the body was there") from error
    except TimeoutError as error:
        raise _Refused(408, "the body did not arrive in time") from error
    return body


def _where(error: BaseException) -> str:
    """Type and place of an error. Never its text: that may quote the pod's environment."""
    frames = traceback.extract_tb(error.__traceback__)[-3:]
    path = " < ".join(f"{f.filename.rpartition('/')[2]}:{f.lineno} {f.name}" for f in reversed(frames))
    return f"{type(error).__name__} at {path}"


class Transport:
    """What the routes share: the rule, its two functions, health and metrics."""

    def __init__(
        self, rule: Rule, health: Health, metrics: Metrics, decide: Decide, build_patch: BuildPatch
    ) -> None:
        self.rule, self.health, self.metrics = rule, health, metrics
        self.decide, self.build_patch = decide, build_patch
        self._turn = asyncio.Lock()
        self._waiting: dict[asyncio.Task[Any], tuple[str, float]] = {}
        self._pushed: set[asyncio.Task[Any]] = set()

    def _headers(self) -> dict[str, str]:
        # While draining, each answer moves the API server's connection to another replica.
        return {"connection": "close"} if self.health.draining else {}

    def _count(self, action: str, reason: str) -> None:
        self.metrics.admissions.labels(action, reason).inc()

    async def _receive(self, request: Request, large: AsyncExitStack) -> bytearray:
        """The body, unless too many are on their way and this client's are most of them."""
        task = asyncio.current_task()
        assert task is not None
        self._waiting[task] = (request.client.host if request.client else "", perf_counter())
        if len(self._waiting) > MOST_WAITING:
            self._push_out()
        try:
            return await _body(request, large, self._turn)
        except asyncio.CancelledError:
            if task not in self._pushed:
                raise
            task.uncancel()
            raise _Refused(503, "too many bodies of this client are on their way") from None
        finally:
            self._waiting.pop(task, None)
            self._pushed.discard(task)

    def _push_out(self) -> None:
        """Ends the wait for the oldest body of the client with most of them, where it waits for long."""
        held = Counter(host for host, _ in self._waiting.values())
        most = max(held, key=lambda each: held[each])
        victim, since = next((task, at) for task, (host, at) in self._waiting.items() if host == most)
        if perf_counter() - since > PATIENCE:
            del self._waiting[victim]
            self._pushed.add(victim)
            victim.cancel()

    def answer(self, asked: review.Review) -> dict[str, Any]:
        """The review's answer, counted and logged; whatever the rule raises comes through."""
        if not asked.concerns_us:
            self._count("skip", "not-pod-create")
            return review.allow(asked.uid)
        about = {"object": asked.reference, "dry_run": asked.dry_run}
        try:
            if asked.adds_ephemeral:
                verdict = decide_ephemeral(asked.pod)
                patch = []
            else:
                verdict = self.decide(asked.pod, asked.namespace, self.rule)
                patch = [] if verdict.action == "deny" else self.build_patch(asked.pod, verdict, self.rule)
        except ContractError as error:
            message = f"{names.RELEASE}: {error}"
            self._count("deny", "malformed")
            log.info("denied %s: %s", asked.reference, error, extra=about)
            return review.deny(asked.uid, message, code=422)
        self._count(str(verdict.action), str(verdict.reason))
        level = logging.DEBUG if verdict.action == "skip" else logging.INFO
        log.log(level, "%s %s: %s", verdict.action, asked.reference, verdict.reason, extra=about)
        if verdict.action == "deny":
            return review.deny(asked.uid, f"{names.RELEASE}: {verdict.message}", warnings=verdict.warnings)
        return review.allow(asked.uid, patch, verdict.warnings)

    async def mutate(self, request: Request) -> Response:
        """POST /mutate: a review for a review, an HTTP error for anything else or a fault of ours."""
        started = perf_counter()
        reference = "a review that could not be read"
        try:
            async with AsyncExitStack() as large:
                asked = review.parse(await self._receive(request, large))
                reference = asked.reference
                return JSONResponse(self.answer(asked), headers=self._headers())
        except (_Refused, ContractError) as error:
            self.metrics.errors.inc()
            status = error.status if isinstance(error, _Refused) else 400
            log.warning("answered %d: %s", status, error)
            return PlainTextResponse(f"{error}\n", status, headers={"connection": "close"})
        except Exception as error:
            self.metrics.errors.inc()
            log.error("internal error with %s: %s", reference, _where(error))
            return PlainTextResponse(
                "internal error; the webhook's log says where\n", 500, headers=self._headers()
            )
        finally:
            self.metrics.duration.observe(perf_counter() - started)

    async def healthz(self, request: Request) -> Response:
        """GET /healthz: the process serves."""
        return PlainTextResponse("ok\n", headers=self._headers())

    async def readyz(self, request: Request) -> Response:
        """GET /readyz: 200, or 503 with the one line that says what is missing."""
        problem = self.health.problem
        return PlainTextResponse(
            f"{problem or 'ok'}\n", 503 if problem else 200, headers={"connection": "close"}
        )

    async def show_metrics(self, request: Request) -> Response:
        """GET /metrics: the text format of Prometheus."""
        return Response(generate_latest(self.metrics.registry), media_type=CONTENT_TYPE_LATEST)


def create_app(
    rule: Rule,
    health: Health,
    metrics: Metrics,
    *,
    decide: Decide = rule_decide,
    build_patch: BuildPatch = rule_build_patch,
) -> FastAPI:
    """The webhook's application."""
    transport = Transport(rule, health, metrics, decide, build_patch)
    app = FastAPI(openapi_url=None)
    # Plain routes: bodies are bounded while they are read, before any framework looks at them.
    app.add_route(names.WEBHOOK_PATH, transport.mutate, methods=["POST"])
    app.add_route(names.HEALTH_PATH, transport.healthz, methods=["GET"])
    app.add_route(names.READY_PATH, transport.readyz, methods=["GET"])
    app.add_route(names.METRICS_PATH, transport.show_metrics, methods=["GET"])
    return app
