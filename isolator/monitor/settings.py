"""Settings of the monitor: environment variables ISOLATOR_MONITOR_*, each checked before anything starts."""

from __future__ import annotations

import json
import logging
import posixpath
import re
from typing import Annotated, Any, Final

from pydantic import AfterValidator, BeforeValidator, Field, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict, SettingsError

from isolator import names
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


def split_address(value: str) -> tuple[str, int]:
    """Host and port of `host:port`, `[ipv6]:port` or `:port` (every address). Raises ValueError."""
    host, colon, port = value.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    if not colon or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise ValueError(f"{value!r} is not host:port, for example 0.0.0.0:{names.MONITOR_PORT}")
    if ":" in host and not bracketed:
        raise ValueError(f"{value!r}: write an IPv6 address in brackets, for example [::]:{port}")
    return host[1:-1] if bracketed else host, int(port)


def _listen(value: str) -> str:
    split_address(value)
    return value


def _mount(value: str) -> str:
    clean = value.startswith("/") and posixpath.normpath(value) == value and not value.startswith("//")
    if not clean or value == "/":
        raise ValueError(f"{value!r} is not an absolute, clean path")
    return value


def _level(value: str) -> str:
    if value.upper() not in logging.getLevelNamesMapping():
        raise ValueError(f"{value!r} is not a level: use DEBUG, INFO, WARNING or ERROR")
    return value.upper()


Seconds = Annotated[float, BeforeValidator(duration)]


class Settings(BaseSettings):
    """What the environment asks for; `load` makes one. Intervals in seconds."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, extra="ignore", frozen=True)

    listen: Annotated[str, AfterValidator(_listen)] = f"0.0.0.0:{names.MONITOR_PORT}"
    mount: Annotated[str, AfterValidator(_mount)] = names.DEFAULT_VGPU_MOUNT
    node_name: str = ""
    update_interval: Annotated[Seconds, Field(ge=0, le=3600)] = 5.0
    resync_interval: Annotated[Seconds, Field(ge=1, le=86400)] = 300.0
    legacy_metrics: bool = False
    host_pid: bool = False
    events: bool = True
    schedulers: tuple[str, ...] = (names.KAI_NAMESPACE,)
    log_level: Annotated[str, AfterValidator(_level)] = "INFO"
    log_json: bool = False


def _lines(error: ValidationError) -> str:
    faults = []
    for fault in error.errors(include_url=False, include_input=False):
        field = str(fault["loc"][0]).upper() if fault["loc"] else ""
        faults.append(f"{PREFIX}{field}: {fault['msg'].removeprefix('Value error, ')}")
    return "; ".join(faults)


def load(**given: Any) -> Settings:
    """The settings of this process's environment; `given` fields come before it.

    Raises UsageError with one line that names each variable that cannot be used.
    """
    try:
        settings = Settings(**given)
    except SettingsError as error:
        named = re.search(r'field "(\w+)"', str(error))
        variable = PREFIX + (named.group(1).upper() if named else "")
        example = json.dumps([names.KAI_NAMESPACE])
        raise UsageError(f"{variable}: not a JSON list of strings, for example {example}") from error
    except ValidationError as error:
        raise UsageError(_lines(error)) from error
    if not settings.node_name:
        raise UsageError(
            f"{PREFIX}NODE_NAME is not set: give the name of this pod's node (fieldRef spec.nodeName)"
        )
    return settings
