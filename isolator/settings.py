"""What the settings of webhook and monitor have in common, and how a faulty one becomes one line.

Settings are environment variables with the prefix of their class, each checked before anything starts.
"""

from __future__ import annotations

import difflib
import json
import logging
import os
import re
from collections.abc import Mapping
from typing import Annotated, Any, Final, TypeVar

from pydantic import AfterValidator, BeforeValidator, ValidationError
from pydantic_core import ErrorDetails
from pydantic_settings import BaseSettings, SettingsConfigDict, SettingsError

from isolator import mountpath, names
from isolator.address import split_address
from isolator.errors import UsageError

log = logging.getLogger(__name__)


def _listen(value: str) -> str:
    split_address(value)
    return value


def _level(value: str) -> str:
    if value.upper() not in logging.getLevelNamesMapping():
        raise ValueError(f"{value!r} is not a level: use DEBUG, INFO, WARNING or ERROR")
    return value.upper()


Listen = Annotated[str, AfterValidator(_listen)]
"""`host:port`."""

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


class Common(BaseSettings):
    """Settings that both have; a class of its own names the prefix."""

    model_config = SettingsConfigDict(extra="ignore", frozen=True)

    mount: Annotated[str, AfterValidator(mountpath.check)] = names.DEFAULT_VGPU_MOUNT
    schedulers: tuple[str, ...] = (names.KAI_SCHEDULER,)
    log_level: Annotated[str, AfterValidator(_level)] = "INFO"
    log_json: bool = False


_Kind = TypeVar("_Kind", bound=Common)


def read(kind: type[_Kind], given: dict[str, Any]) -> _Kind:
    """The settings of this process's environment; `given` fields come before it.

    Raises UsageError with one line that names each variable that cannot be used.
    """
    prefix = kind.model_config.get("env_prefix") or ""
    try:
        return kind(**given)
    except SettingsError as error:
        named = re.search(r'field "(\w+)"', str(error))
        variable = prefix + (named.group(1).upper() if named else "")
        example = json.dumps([names.KAI_SCHEDULER])
        raise UsageError(f"{variable}: not a JSON list of strings, for example {example}") from error
    except ValidationError as error:
        raise UsageError(_lines(error, prefix)) from error


def _lines(error: ValidationError, prefix: str) -> str:
    faults = []
    for fault in error.errors(include_url=False):
        field = str(fault["loc"][0]).upper() if fault["loc"] else ""
        faults.append(
            f"{prefix}{field}: {_line(fault, 's' if field.endswith(('_INTERVAL', '_LIFE')) else '')}"
        )
    return "; ".join(faults)


def _line(fault: ErrorDetails, unit: str) -> str:
    """One fault in a user's words; `unit` belongs to its bounds."""
    kind, given, bound = fault["type"], fault["input"], fault.get("ctx", {})
    if kind == "value_error":
        return fault["msg"].removeprefix("Value error, ")
    if kind.startswith("bool"):
        return f"{given!r} is not true or false"
    if kind.startswith(("int", "float")):
        return f"{given!r} is not a number"
    if kind == "literal_error":
        return f"{given!r} is not {bound['expected']}"
    if kind == "string_too_short":
        return f"{given!r} is too short: give a name"
    for word, sense in (("ge", "at least"), ("le", "at most")):
        if word in bound:
            return f"{given!r} is out of range: give {sense} {bound[word]:g}{unit}"
    return f"{given!r}: {fault['msg']}"


def unknown(kind: type[Common], environment: Mapping[str, str]) -> list[str]:
    """One line for each variable of this part's prefix that no setting reads: a typing error, most likely."""
    prefix = kind.model_config.get("env_prefix") or ""
    known = [field.upper() for field in kind.model_fields]
    lines = []
    for name in sorted(environment):
        # The kubelet's, where a Service is called like the prefix.
        own = name.upper().removeprefix(prefix)
        foreign = re.fullmatch(r"SERVICE_(HOST|PORT.*)|PORT(_.*)?", own)
        if not name.upper().startswith(prefix) or own in known or foreign:
            continue
        near = difflib.get_close_matches(own, known, 1)
        lines.append(f"{name} is no setting and is ignored" + (f": {prefix}{near[0]} is one" if near else ""))
    return lines


def warn(kind: type[Common]) -> None:
    """Logs what `unknown` finds in this process's environment."""
    for line in unknown(kind, os.environ):
        log.warning("%s", line)
