"""`isolator webhook`: settings, certificates and the HTTPS server put together."""

from __future__ import annotations

import datetime as dt
import gc
import logging
import signal
import time
from pathlib import Path
from types import FrameType
from typing import Final

from fastapi import FastAPI

from isolator import logs, names, serving
from isolator.address import listen
from isolator.settings import warn
from isolator.webhook import certs
from isolator.webhook.app import create_app
from isolator.webhook.bundle import BundleWriter, SecretStore
from isolator.webhook.health import Health
from isolator.webhook.keeper import Assemble, Bundle, Directory, Keeper, Source
from isolator.webhook.metrics import Metrics
from isolator.webhook.settings import PREFIX, Settings, load
from isolator.webhook.tls import ReloadingContext

log = logging.getLogger(__name__)

GRACE_SECONDS: Final = 15
"""What requests in flight get after the drain."""


class Server(serving.Server):
    """A server that first drains: not ready, still serving, then the end of what is in flight."""

    def __init__(self, app: FastAPI, context: ReloadingContext, health: Health, drain: float) -> None:
        config = serving.config(app, timeout_graceful_shutdown=GRACE_SECONDS)
        config.load()
        config.ssl = context
        super().__init__(config)
        self._health, self._drain = health, drain
        self._exit_at: float | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal starts the drain, a second one ends it."""
        if self._exit_at is not None:
            self.should_exit = True
            self.force_exit = self.force_exit or sig == signal.SIGINT
            self.wake()
            return
        self._exit_at = time.monotonic() + self._drain
        self._health.draining = True
        self.wake()

    def pause(self) -> float:
        """To the end of the drain, where one runs; that ends the server."""
        if self._exit_at is None:
            return super().pause()
        left = self._exit_at - time.monotonic()
        self.should_exit = self.should_exit or left <= 0
        return max(0.0, min(super().pause(), left))


def _placeholder() -> ReloadingContext:
    """A pair that no client trusts, so that /healthz and /readyz answer before the real one is there."""
    pair = certs.issue_ca(dt.datetime.now(dt.UTC), dt.timedelta(days=1))
    return ReloadingContext(pair.certificate_pem(), pair.key_pem())


def assembly(settings: Settings) -> Assemble:
    """What the keeper calls to get its source and, where caBundle is ours to set, its writer."""

    def assemble() -> tuple[Source, Bundle | None]:
        builtin = settings.tls_mode == "builtin"
        files = Directory(Path(settings.tls_directory), with_ca=settings.set_ca_bundle)
        if not builtin and not settings.set_ca_bundle:
            return files, None
        from isolator.webhook.kube import Api  # loads `kubernetes`, which some modes never need

        api = Api()
        hosts = certs.service_names(settings.service, settings.namespace)
        writer = BundleWriter(api, settings.configuration) if settings.set_ca_bundle else None
        if not builtin:
            return files, writer
        return SecretStore(api, settings.namespace, settings.secret, hosts, settings.lives()), writer

    return assemble


def run() -> int:
    """Serves until SIGTERM or SIGINT; returns the exit status. Raises UsageError for bad settings."""
    settings = load()
    logs.setup(settings.log_level, settings.log_json)
    warn(Settings)
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
    log.info(
        "webhook starting listen=%s mount=%s onNoLimit=%s tls=%s annotationKeys=%s",
        settings.listen,
        settings.mount,
        settings.on_no_limit,
        settings.tls_mode,
        "|".join(names.TRIGGER_ANNOTATIONS),
    )
    health, metrics, context = Health(), Metrics(), _placeholder()
    # The second name is the one that the API server calls.
    hosts = certs.service_names(settings.service, settings.namespace)[1:2] if settings.namespace else ()
    keeper = Keeper(assembly(settings), context, health, metrics, hosts=hosts)
    server = Server(create_app(settings.rule(), health, metrics), context, health, settings.drain_seconds)
    bound = listen(settings.listen, f"{PREFIX}LISTEN")
    keeper.start()
    # What is loaded now stays: looking through it for garbage would pause requests.
    gc.collect()
    gc.freeze()
    server.run(sockets=[bound])
    keeper.stop()
    log.info("webhook stopped")
    return 0
