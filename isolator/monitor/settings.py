"""Settings of the monitor: environment variables ISOLATOR_MONITOR_*."""

from __future__ import annotations

import re
from typing import Annotated, Any, Final

from pydantic import BeforeValidator, Field
from pydantic_settings import SettingsConfigDict

from isolator import names, settings
from isolator.errors import UsageError

PREFIX: Final = "ISOLATOR_MONITOR_"
_UNITS: Final = {"ns": 1e-9, "us": 1e-6, "\u00b5s": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_PART: Final = re.compile(r"(\d+(?:\.\d*)?|\.\d+)(ns|us|\u00b5s|ms|s|m|h)", re.ASCII)


def duration(value: Any) -> float:
    """Seconds of a Go duration such as 5s, 1m30s or 500ms; numbers pass. Raises ValueError otherwise."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    text = str(value).strip()
    parts = _PART.findall(text)
    if not parts or "".join(number + unit for number, unit in parts) != text:
        raise ValueError(f"{text!r} is not a duration, for example 5s, 5m or 1m30s")
    return sum(float(number) * _UNITS[unit] for number, unit in parts)


Seconds = Annotated[float, BeforeValidator(duration)]


class Settings(settings.Common):
    """What the environment asks for; `load` makes one. Intervals in seconds."""

    model_config = SettingsConfigDict(env_prefix=PREFIX)

    listen: settings.Listen = f"0.0.0.0:{names.MONITOR_PORT}"
    node_name: str = ""
    update_interval: Annotated[Seconds, Field(ge=0, le=3600)] = 5.0
    resync_interval: Annotated[Seconds, Field(ge=1, le=86400)] = 300.0
    legacy_metrics: bool = False
    host_pid: bool = False
    events: bool = True


def load(**given: Any) -> Settings:
    """The settings of this process's environment; `given` fields come before it.

    Raises UsageError with one line that names each variable that cannot be used.
    """
    found = settings.read(Settings, given)
    if not found.node_name:
        raise UsageError(
            f"{PREFIX}NODE_NAME is not set: give the name of this pod's node (fieldRef spec.nodeName)"
        )
    return found
