"""Settings of the webhook: environment variables ISOLATOR_WEBHOOK_*, each checked before anything starts."""

from __future__ import annotations

import json
import logging
import posixpath
import re
from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, Field, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict, SettingsError

from isolator import names
from isolator.errors import UsageError
from isolator.webhook.rule import Rule

PREFIX: Final = "ISOLATOR_WEBHOOK_"
DEFAULT_SECRET: Final = f"{names.RELEASE}-webhook-tls"
DEFAULT_SERVICE: Final = f"{names.RELEASE}-webhook"
DEFAULT_SANDBOXES: Final = ("gvisor", "kata*")


def _listen(value: str) -> str:
    split_address(value)
    return value


def _mount(value: str) -> str:
    # The preload file is a list split at white space and colons, a Kubernetes mount path has no colon.
    clean = value.startswith("/") and posixpath.normpath(value) == value and not value.startswith("//")
    if not clean or value == "/" or re.search(r"[\s:$]", value):
        raise ValueError(f"{value!r} is not an absolute, clean path without white space, ':' and '$'")
    return value


def _absolute(value: str) -> str:
    if not value.startswith("/"):
        raise ValueError(f"{value!r} is not an absolute path")
    return value


def _level(value: str) -> str:
    if value.upper() not in logging.getLevelNamesMapping():
        raise ValueError(f"{value!r} is not a level: use DEBUG, INFO, WARNING or ERROR")
    return value.upper()


def split_address(value: str) -> tuple[str, int]:
    """Host and port of `host:port`, `[ipv6]:port` or `:port` (every address, IPv4 and IPv6).

    Raises ValueError with one line.
    """
    host, colon, port = value.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    if not colon or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise ValueError(f"{value!r} is not host:port, for example 0.0.0.0:{names.WEBHOOK_PORT}")
    if ":" in host and not bracketed:
        raise ValueError(f"{value!r}: write an IPv6 address in brackets, for example [::]:{port}")
    return host[1:-1] if bracketed else host, int(port)


class Settings(BaseSettings):
    """What the environment asks for; `load` makes one."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, extra="ignore", frozen=True)

    listen: Annotated[str, AfterValidator(_listen)] = f"0.0.0.0:{names.WEBHOOK_PORT}"
    mount: Annotated[str, AfterValidator(_mount)] = names.DEFAULT_VGPU_MOUNT
    on_no_limit: Literal["refuse", "release", "deny"] = "refuse"
    pod_opt_out: bool = True
    schedulers: tuple[str, ...] = (names.KAI_NAMESPACE,)
    sandbox_classes: tuple[str, ...] = DEFAULT_SANDBOXES
    tls_mode: Literal["builtin", "files"] = "builtin"
    tls_directory: Annotated[str, AfterValidator(_absolute)] = "/etc/tls"
    set_ca_bundle: bool = True
    secret: Annotated[str, Field(min_length=1)] = DEFAULT_SECRET
    service: Annotated[str, Field(min_length=1)] = DEFAULT_SERVICE
    namespace: str = ""
    configuration: Annotated[str, Field(min_length=1)] = names.WEBHOOK_CONFIGURATION
    drain_seconds: Annotated[float, Field(ge=0, le=300)] = 5.0
    log_level: Annotated[str, AfterValidator(_level)] = "INFO"
    log_json: bool = False

    def rule(self) -> Rule:
        """The part that decides about pods."""
        return Rule(
            mount=self.mount,
            on_no_limit=self.on_no_limit,
            pod_opt_out=self.pod_opt_out,
            schedulers=self.schedulers,
            sandbox_classes=self.sandbox_classes,
        )


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
    if not settings.namespace and settings.tls_mode == "builtin":
        raise UsageError(
            f"{PREFIX}NAMESPACE is not set: give the namespace of this pod (fieldRef metadata.namespace), "
            f"or set {PREFIX}TLS_MODE=files"
        )
    return settings
