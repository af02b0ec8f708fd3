"""Settings of the webhook: environment variables ISOLATOR_WEBHOOK_*."""

from __future__ import annotations

import datetime as dt
from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, Field
from pydantic_settings import SettingsConfigDict

from isolator import names, settings
from isolator.errors import UsageError
from isolator.webhook import certs
from isolator.webhook.rule import SANDBOX_CLASSES, Rule

PREFIX: Final = names.ENV_PREFIX_WEBHOOK
SHORTEST: Final = 120
"""Seconds that a certificate lives at least: keeper and API server need some of them."""
DEFAULT_SECRET: Final = f"{names.RELEASE}-webhook-tls"
DEFAULT_SERVICE: Final = f"{names.RELEASE}-webhook"


def _absolute(value: str) -> str:
    if not value.startswith("/"):
        raise ValueError(f"{value!r} is not an absolute path")
    return value


class Settings(settings.Common):
    """What the environment asks for; `load` makes one."""

    model_config = SettingsConfigDict(env_prefix=PREFIX)

    listen: settings.Listen = f"0.0.0.0:{names.WEBHOOK_PORT}"
    on_no_limit: Literal["refuse", "release", "deny"] = "refuse"
    pod_opt_out: bool = True
    sandbox_classes: tuple[str, ...] = SANDBOX_CLASSES
    tls_mode: Literal["builtin", "files"] = "builtin"
    tls_directory: Annotated[str, AfterValidator(_absolute)] = "/etc/tls"
    set_ca_bundle: bool = True
    certificate_life: Annotated[settings.Seconds, Field(ge=SHORTEST)] = certs.LIVES.leaf.total_seconds()
    ca_life: Annotated[settings.Seconds, Field(ge=SHORTEST)] = certs.LIVES.ca.total_seconds()
    secret: Annotated[str, Field(min_length=1)] = DEFAULT_SECRET
    service: Annotated[str, Field(min_length=1)] = DEFAULT_SERVICE
    namespace: str = ""
    configuration: Annotated[str, Field(min_length=1)] = names.WEBHOOK_CONFIGURATION
    drain_seconds: Annotated[float, Field(ge=0, le=300)] = 5.0

    def lives(self) -> certs.Lives:
        """Of the built-in certificates."""
        return certs.Lives(dt.timedelta(seconds=self.ca_life), dt.timedelta(seconds=self.certificate_life))

    def rule(self) -> Rule:
        """The part that decides about pods."""
        return Rule(
            mount=self.mount,
            on_no_limit=self.on_no_limit,
            pod_opt_out=self.pod_opt_out,
            schedulers=self.schedulers,
            sandbox_classes=self.sandbox_classes,
        )


def load(**given: Any) -> Settings:
    """The settings of this process's environment; `given` fields come before it.

    Raises UsageError with one line that names each variable that cannot be used.
    """
    found = settings.read(Settings, given)
    if found.ca_life < found.certificate_life:
        raise UsageError(
            f"{PREFIX}CA_LIFE ({found.ca_life:g}s) is shorter than {PREFIX}CERTIFICATE_LIFE "
            f"({found.certificate_life:g}s): give a longer one"
        )
    if not found.namespace and found.tls_mode == "builtin":
        raise UsageError(
            f"{PREFIX}NAMESPACE is not set: give the namespace of this pod (fieldRef metadata.namespace), "
            f"or set {PREFIX}TLS_MODE=files"
        )
    return found
