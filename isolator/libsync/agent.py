"""The loop of one node: install, check, sweep, report; at once, then at each interval."""

from __future__ import annotations

import hashlib
import logging
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from isolator import __version__
from isolator.errors import ContractError, IsolatorError, NotBuiltError, UsageError
from isolator.libpath import architecture
from isolator.libpath import library as image_library
from isolator.libsync import files, install, mount, remove, status
from isolator.libsync.cache import GRACE, Caches
from isolator.names import CONTAINERS_DIRECTORY, LIBRARY_FILE

log = logging.getLogger(__name__)

RETRY: Final = 10.0
"""Seconds to the next pass after one that found a problem, where the interval is longer."""


@dataclass(frozen=True)
class Options:
    """What the command line says. `library` is a path or "auto"; `version_file` says which version that path
    is (None: this package's). `preload` is the configured file to compare with; `own_pod` this pod's UID,
    where known; `group` may look into the mount, None for anyone."""

    mount: Path
    preload: Path | None
    library: str
    pods: Path
    interval: float
    node: str
    own_pod: str | None = None
    remove: bool = False
    group: int | None = None
    version_file: Path | None = None


class Agent:
    """One installer process; `ready` and `healthy` answer the probes from another thread."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.caches = Caches(options.pods, options.own_pod, 0 if options.remove else GRACE)
        self.status = status.Status(node=options.node, agent_started=time.time())
        self._whole = False
        self._said: str | None = ""
        self._answer = (False, "the first pass has not ended")
        self._ended = time.monotonic()

    def ready(self) -> tuple[bool, str]:
        """Whether the last pass read everything back and found it right (with `remove`: has its outcome)."""
        if time.monotonic() - self._ended > 2 * self.options.interval + 30:
            return False, "the last pass does not end: is the disk of the node stuck?"
        return self._answer

    def healthy(self) -> tuple[bool, str]:
        """False where a pass hangs so long that only a new process may help."""
        hangs = time.monotonic() - self._ended > 5 * self.options.interval + 300
        return not hangs, "a pass hangs" if hangs else "ok"

    def run_once(self) -> bool:
        """One pass; never raises for what the node or the image may be like."""
        try:
            good, line = self._pass()
        except OSError as error:
            good, line = False, files.explain(error, self.options.mount)
        except IsolatorError as error:
            good, line = False, str(error)
        if line != self._said:
            level = logging.ERROR if not good else logging.WARNING if self.status.problem else logging.INFO
            log.log(level, "%s", line)
        self._said = line
        self._answer = (good, line)
        self._ended = time.monotonic()
        return good

    def loop(self) -> None:
        """Passes until the process ends; SIGHUP (blocked by the caller) asks for one now."""
        while True:
            good = self.run_once()
            wait = self.options.interval if good else min(self.options.interval, RETRY)
            signal.sigtimedwait([signal.SIGHUP], wait)

    def _source(self) -> install.Source:
        options = self.options
        try:
            path = image_library() if options.library == "auto" else Path(options.library)
            named = options.version_file
            version = install.read_version(named) if named else __version__
            return install.load(path, architecture(), version, install.OTHER if named else install.OWN)
        except (NotBuiltError, UsageError) as error:
            raise ContractError(f"this image has no library for the node: {error}") from error

    def _pass(self) -> tuple[bool, str]:
        options = self.options
        mount.check_place(options.mount)
        if options.remove:
            return remove.run(options.mount, self.caches, self.status)
        mount.make(options.mount)
        with files.folder(options.mount) as fd, files.locked(fd) as alone:
            if not alone:
                log.warning("another process holds the lock of %s: going on without", options.mount)
            before = status.read(fd)
            if not before:
                mount.check_ours(fd, options.mount)
            if self._newer(before):
                return True, "a newer libsync keeps this node; standing by"
            try:
                if options.preload:
                    install.check_preload(options.preload, options.mount)
                site = install.Site(options.mount, fd, self._source(), alone, options.group)
                outcome = install.run(site)
                self._note(site, outcome, before)
                line = f"{site.source.folder} is in place"
            except ContractError as error:
                outcome = install.Outcome(False, (str(error),), (), None)
                line = ""
                self._keep(fd, before)
            problems = [*outcome.problems, *self._sweep(fd)]
            self.status.problem = "; ".join(problems) or None
            self.status.ready = outcome.verified
            try:
                self.status.write(fd)
            except OSError as error:
                problems.append(f"status not written: {files.explain(error, options.mount)}")
            return outcome.verified, "; ".join(dict.fromkeys(problems)) or line

    def _newer(self, before: dict[str, object]) -> bool:
        """Whether a process started after this one keeps the node: two would undo each other's version."""
        started, verified = before.get("agent_started"), before.get("verified_at")
        if not (isinstance(started, float) and isinstance(verified, float) and before.get("ready")):
            return False
        # A clock that was set back must not leave the node to a process that ended long ago.
        fresh = -5 < time.time() - verified < 3 * self.options.interval
        return fresh and started > self.status.agent_started

    def _note(self, site: install.Site, outcome: install.Outcome, before: dict[str, object]) -> None:
        known = self._whole or (
            before.get("ready") is True and before.get("library_sha256") == site.source.sha256
        )
        if outcome.changes and known:
            self.status.repairs += len(outcome.changes)
            log.warning("repaired: %s", ", ".join(outcome.changes))
        elif outcome.changes:
            log.info("%s", install.tell(outcome.changes))
        self._whole = outcome.verified
        self.status.library_version = site.source.version
        self.status.library_sha256 = site.source.sha256
        self.status.installed_at = outcome.installed_at
        if outcome.verified:
            self.status.verified_at = time.time()

    def _keep(self, fd: int, before: dict[str, object]) -> None:
        """Says on what the node has while this process can install nothing."""
        got = files.read(fd, LIBRARY_FILE)
        version, digest = before.get("library_version"), before.get("library_sha256")
        known = isinstance(version, str) and got and hashlib.sha256(got[0]).hexdigest() == digest
        self.status.library_version = str(version) if known else None
        self.status.library_sha256 = str(digest) if known else None
        installed = before.get("installed_at")
        self.status.installed_at = installed if known and isinstance(installed, float) else None

    def _sweep(self, fd: int) -> list[str]:
        try:
            with files.folder(CONTAINERS_DIRECTORY, fd) as opened:
                report = self.caches.sweep(opened)
        except FileNotFoundError:
            return []  # said by the step that could not make it
        except OSError as error:
            return [f"cache folders not looked at: {files.explain(error, self.options.mount)}"]
        self.status.caches = report.caches
        self.status.oversized_caches = report.oversized
        self.status.removed_caches += report.removed
        self.status.removed_foreign_files += report.foreign
        return []
