"""Keeps the serving certificate and caBundle right, in a thread of its own.

A source says what to serve; what does not fit or cannot be read leaves the pair that is served. A pair of a
new CA is served when caBundle has had that CA for a while, and the CA before stays in it until it ends:
whichever replica or API server is first, each connection meets a certificate that is trusted. Each problem is
logged once when it appears and once when it is over.
"""

from __future__ import annotations

import datetime as dt
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final, Protocol

from isolator.errors import ContractError, IsolatorError, UnavailableError
from isolator.webhook import certs, tls
from isolator.webhook.bundle import Change
from isolator.webhook.health import Health
from isolator.webhook.metrics import Metrics

log = logging.getLogger(__name__)

INTERVAL: Final = 10.0
"""Seconds between looks at the source and at caBundle."""
FIRST_RETRY: Final = 0.5
"""Seconds after the first failure; doubled up to INTERVAL."""
SPREAD: Final = 10.0
"""Seconds until every API server has seen a change of caBundle, with room: they watch it."""
RECENT: Final = dt.timedelta(hours=1)
"""Age of a CA up to which another replica may have put it into caBundle only just now."""


class Source(Protocol):
    """Where the serving pair comes from."""

    def read(self) -> Mapping[str, bytes]:
        """tls.crt, tls.key and, where caBundle is set from here, ca.crt. Raises IsolatorError."""


class Bundle(Protocol):
    """What holds caBundle."""

    def ensure(self, pem: bytes) -> Change:
        """Adds what is missing; says what had to be done. Raises IsolatorError."""


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
        context: tls.ReloadingContext,
        health: Health,
        metrics: Metrics,
        interval: float = INTERVAL,
        hosts: Sequence[str] = (),
        spread: float = SPREAD,
    ) -> None:
        """`hosts`: the webhook's names; a certificate for others is served with a warning."""
        super().__init__(name="certificates", daemon=True)
        self._assemble, self._context, self._health, self._metrics = assemble, context, health, metrics
        self._interval, self._hosts, self._spread = interval, hosts, spread
        self._parts: tuple[Source, Bundle | None] | None = None
        self._wanted: Mapping[str, bytes] = {}
        self._served: Mapping[str, bytes] = {}
        self._trusted: frozenset[bytes] = frozenset()
        """CAs that caBundle has had for SPREAD."""
        self._spread_at: float | None = None
        """When the CAs of `_wanted` will be there, where they are new."""
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
                if self._spread_at is not None:
                    delay = min(delay, max(0.0, self._spread_at - time.monotonic()))
            else:
                delay, retry = min(retry, self._interval), retry * 2

    def round(self) -> bool:
        """One look at everything; says whether all is well."""
        well = self._attempt("certificate", self._look) and self._attempt("caBundle", self._publish)
        # Without caBundle a first pair is served all the same, for the probes; one that ended helps nobody.
        if self._wanted != self._served and (well or not self._served or self._has_ended()):
            well = self._attempt("certificate", self._serve) and well
        return well

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

    def _look(self) -> None:
        """Takes what the source wants to be served, where it can be."""
        if self._parts is None:
            self._parts = self._assemble()
        data = self._parts[0].read()
        if data == self._wanted:
            return
        try:
            if certs.CA in data:
                certs.bundle(data[certs.CA])
            certs.expiry(data[certs.CERTIFICATE])
            tls.context(data[certs.CERTIFICATE], data[certs.KEY])
        except (ContractError, ValueError) as error:
            self._metrics.loads.labels("failed").inc()
            if isinstance(error, ContractError):
                raise
            raise ContractError(f"not a PEM certificate: {error}") from error
        self._wanted, self._spread_at = dict(data), None

    def _publish(self) -> None:
        """Lets the API server trust the CAs of what is wanted."""
        assert self._parts is not None
        writer = self._parts[1]
        if writer is None:
            self._health.bundle = None
            return
        pem = certs.bundle(self._wanted[certs.CA])
        change = writer.ensure(pem)
        if change is not Change.NONE:
            log.info("set caBundle")
            if self._wanted != self._served:
                self._trusted = frozenset()  # any of them may have been missing
        new = frozenset(certs.split(pem)) - self._trusted
        if new and self._is_trusted_at_once(change, pem):
            self._spread_at = time.monotonic()
        elif new and (self._spread_at is None or change is not Change.NONE):
            self._spread_at = time.monotonic() + self._spread
            log.info("caBundle has a new CA: its certificate is served in %.0f s", self._spread)
        if self._spread_at is not None and time.monotonic() >= self._spread_at:
            self._trusted, self._spread_at = self._trusted | new, None
        if self._spread_at is None:
            self._health.bundle = None

    def _is_trusted_at_once(self, change: Change, pem: bytes) -> bool:
        """Where there is nothing better to serve: nobody was trusted before, or this replica has just started
        and found the CAs in caBundle, unless they may have come there only now."""
        if change is Change.FIRST:
            return not self._served or self._served == self._wanted
        recent = certs.is_successor(pem, dt.datetime.now(dt.UTC), RECENT)
        return change is Change.NONE and not self._served and not recent

    def _has_ended(self) -> bool:
        return certs.expiry(self._served[certs.CERTIFICATE]) <= dt.datetime.now(dt.UTC)

    def _serve(self) -> None:
        """Serves what is wanted, unless its CA has yet to spread."""
        if self._spread_at is not None and self._served and not self._has_ended():
            return
        data = self._wanted
        self._context.load(data[certs.CERTIFICATE], data[certs.KEY])
        ends = certs.expiry(data[certs.CERTIFICATE])
        self._served = data
        self._metrics.loads.labels("ok").inc()
        self._metrics.expiry.set(ends.timestamp())
        self._health.certificate = None
        log.info("serving a certificate that ends at %s", f"{ends:%Y-%m-%dT%H:%M:%SZ}")
        wrong = certs.leaf_fault(data[certs.CERTIFICATE], self._hosts, dt.datetime.now(dt.UTC))
        if wrong:
            log.warning("the API server will not accept the certificate: it %s; replace it", wrong)
