"""Whether the webhook may be sent reviews, and if not, the one line that says why."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Health:
    """Written by the keeper's thread and the server, read by /readyz; None means nothing is wrong.

    Both conditions latch: an API server that is away for a while must not take working replicas out of it.
    """

    certificate: str | None = "no serving certificate yet"
    bundle: str | None = "caBundle is not set yet"
    draining: bool = False

    @property
    def problem(self) -> str | None:
        """Why not ready, or None."""
        return "shutting down" if self.draining else self.certificate or self.bundle
