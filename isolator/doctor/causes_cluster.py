"""Causes that show from the API server: codes 60 to 99."""

from __future__ import annotations

from typing import Final

from isolator.doctor.cause import Cause

CLUSTER: Final[tuple[Cause, ...]] = ()
