"""Settings of the monitor: environment variables ISOLATOR_MONITOR_*."""

from __future__ import annotations

from typing import Annotated, Any, Final

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from isolator import names, settings
from isolator.errors import UsageError

PREFIX: Final = names.ENV_PREFIX_MONITOR


class Settings(settings.Common):
    """What the environment asks for; `load` makes one. Intervals in seconds."""

    model_config = SettingsConfigDict(env_prefix=PREFIX)

    listen: settings.Listen = f"0.0.0.0:{names.MONITOR_PORT}"
    node_name: str = ""
    update_interval: Annotated[settings.Seconds, Field(ge=0, le=3600)] = 5.0
    resync_interval: Annotated[settings.Seconds, Field(ge=1, le=86400)] = 300.0
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
