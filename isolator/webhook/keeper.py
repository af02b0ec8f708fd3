"""Keeps the serving certificate and caBundle right, in a thread of its own.

A source says what to serve; what does not fit or cannot be read leaves the pair that is served. Each problem
is logged once when it appears and once when it is over.
"""

from __future__ import annotations

import datetime as dt
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final, Protocol

from isolator.errors import ContractError, IsolatorError, UnavailableError
from isolator.webhook import certs
from isolator.webhook.health import Health
from isolator.webhook.metrics import Metrics
from isolator.webhook.tls import ReloadingContext

log = logging.getLogger(__name__)

INTERVAL: Final = 10.0
"""Seconds between looks at the source and at caBundle."""
FIRST_RETRY: Final = 0.5
"""Seconds after the first failure; doubled up to INTERVAL."""


class Source(Protocol):
    """Where the serving pair comes from."""

    def read(self) -> Mapping[str, bytes]:
        """tls.crt, tls.key and, where caBundle is set from here, ca.crt. Raises IsolatorError."""


class Bundle(Protocol):
    """What holds caBundle."""

    def ensure(self, pem: bytes) -> bool:
        """Sets it where needed; says whether it was. Raises IsolatorError."""


Assemble = Callable[[], tuple[Source, Bundle | None]]


class Directory:
    """A mounted Secret: tls.crt, tls.key and, where it is needed, ca.crt."""

    def __init__(self, path: Path, *, with_ca: bool) -> None:
        self._path = path
        self._names = (certs.CERTIFICATE, certs.KEY) + ((certs.CA,) if with_ca else ())

    def read(self) -> dict[str, bytes]:
        """The files of one generation. Raises UnavailableError where one is missing."""
        # The kubelet exchanges all files at once by renaming the link `..data`.
        generation = self._path / "..data"
        folder = generation.resolve() if generation.is_symlink() else self._path
        try:
            return {name: (folder / name).read_bytes() for name in self._names}
        except OSError as error:
            name = Path(str(error.filename)).name
            raise UnavailableError(
                f"cannot read {self._path / name}: {error.strerror}; it takes {', '.join(self._names)}"
            ) from error


class Keeper(threading.Thread):
    """Runs until `stop`; the first round begins at once and connects."""

    def __init__(
        self,
        assemble: Assemble,
        context: ReloadingContext,
        health: Health,
        metrics: Metrics,
        interval: float = INTERVAL,
        hosts: Sequence[str] = (),
    ) -> None:
        """`hosts`: the webhook's names; a certificate for others is served with a warning."""
        super().__init__(name="certificates", daemon=True)
        self._assemble, self._context, self._health, self._metrics = assemble, context, health, metrics
        self._interval, self._hosts = interval, hosts
        self._parts: tuple[Source, Bundle | None] | None = None
        self._served: Mapping[str, bytes] = {}
        self._said: dict[str, str] = {}
        self._stopping = threading.Event()

    def stop(self) -> None:
        """Ends the thread after the call it is in."""
        self._stopping.set()

    def run(self) -> None:
        """Rounds until `stop`: quickly again after a failure, else each interval."""
        retry = FIRST_RETRY
        delay = 0.0
        while not self._stopping.wait(delay):
            if self.round():
                delay, retry = self._interval, FIRST_RETRY
            else:
                delay, retry = min(retry, self._interval), retry * 2

    def round(self) -> bool:
        """One look at everything; says whether all is well."""
        return self._attempt("certificate", self._certificate) and self._attempt("caBundle", self._bundle)

    def _attempt(self, topic: str, action: Callable[[], None]) -> bool:
        try:
            action()
        except IsolatorError as error:
            problem = str(error)
        except Exception as error:
            # The thread must outlive any surprise: without it nothing is ever renewed or set again.
            log.exception("%s: unexpected %s", topic, type(error).__name__)
            problem = f"unexpected {type(error).__name__}; the log has more"
        else:
            if self._said.pop(topic, None):
                log.info("%s: all right again", topic)
            return True
        if self._said.get(topic) != problem:
            self._said[topic] = problem
            log.warning("%s: %s", topic, problem)
        if topic == "certificate" and self._health.certificate:
            self._health.certificate = problem
        if topic == "caBundle" and self._health.bundle:
            self._health.bundle = problem
        return False

    def _certificate(self) -> None:
        if self._parts is None:
            self._parts = self._assemble()
        data = self._parts[0].read()
        if data == self._served:
            return
        try:
            if certs.CA in data:
                certs.bundle(data[certs.CA])
            ends = certs.expiry(data[certs.CERTIFICATE])
            self._context.load(data[certs.CERTIFICATE], data[certs.KEY])
        except ContractError:
            self._metrics.loads.labels("failed").inc()
            raise
        except ValueError as error:
            self._metrics.loads.labels("failed").inc()
            raise ContractError(f"not a PEM certificate: {error}") from error
        self._served = dict(data)
        self._metrics.loads.labels("ok").inc()
        self._metrics.expiry.set(ends.timestamp())
        self._health.certificate = None
        log.info("serving a certificate that ends at %s", f"{ends:%Y-%m-%dT%H:%M:%SZ}")
        wrong = certs.leaf_fault(data[certs.CERTIFICATE], self._hosts, dt.datetime.now(dt.UTC))
        if wrong:
            log.warning("the API server will not accept the certificate: it %s; replace it", wrong)

    def _bundle(self) -> None:
        assert self._parts is not None
        writer = self._parts[1]
        if writer is not None and writer.ensure(certs.bundle(self._served[certs.CA])):
            log.info("set caBundle")
        self._health.bundle = None
