"""What the settings of webhook and monitor have in common, and how a faulty one becomes one line.

Settings are environment variables with the prefix of their class, each checked before anything starts.
"""

from __future__ import annotations

import json
import logging
import posixpath
import re
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict, SettingsError

from isolator import names
from isolator.address import split_address
from isolator.errors import UsageError


def _listen(value: str) -> str:
    split_address(value)
    return value


def _mount(value: str) -> str:
    # The preload file is a list split at white space and colons, a Kubernetes mount path has no colon.
    clean = value.startswith("/") and posixpath.normpath(value) == value and not value.startswith("//")
    if not clean or value == "/" or re.search(r"[\s:$]", value):
        raise ValueError(f"{value!r} is not an absolute, clean path without white space, ':' and '$'")
    return value


def _level(value: str) -> str:
    if value.upper() not in logging.getLevelNamesMapping():
        raise ValueError(f"{value!r} is not a level: use DEBUG, INFO, WARNING or ERROR")
    return value.upper()


Listen = Annotated[str, AfterValidator(_listen)]
"""`host:port`."""


class Common(BaseSettings):
    """Settings that both have; a class of its own names the prefix."""

    model_config = SettingsConfigDict(extra="ignore", frozen=True)

    mount: Annotated[str, AfterValidator(_mount)] = names.DEFAULT_VGPU_MOUNT
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
    for fault in error.errors(include_url=False, include_input=False):
        field = str(fault["loc"][0]).upper() if fault["loc"] else ""
        faults.append(f"{prefix}{field}: {fault['msg'].removeprefix('Value error, ')}")
    return "; ".join(faults)
