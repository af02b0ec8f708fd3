"""Settings that cannot be used, and variables that no setting reads, in a user's words."""

from __future__ import annotations

from typing import Any

import pytest

from isolator.errors import UsageError
from isolator.monitor import settings as monitor
from isolator.settings import unknown
from isolator.webhook import settings as webhook


@pytest.mark.parametrize(
    ("part", "name", "value", "line"),
    [
        (webhook, "POD_OPT_OUT", "maybe", "'maybe' is not true or false"),
        (monitor, "EVENTS", "ja", "'ja' is not true or false"),
        (webhook, "ON_NO_LIMIT", "allow", "'allow' is not 'refuse', 'release' or 'deny'"),
        (webhook, "DRAIN_SECONDS", "soon", "'soon' is not a number"),
        (webhook, "DRAIN_SECONDS", "-1", "'-1' is out of range: give at least 0"),
        (monitor, "UPDATE_INTERVAL", "2h", "'2h' is out of range: give at most 3600s"),
        (webhook, "SECRET", "", "'' is too short: give a name"),
    ],
)
def test_a_fault_is_told_in_plain_words(
    part: Any, name: str, value: str, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The variable by its full name, what it holds, and what it may hold."""
    monkeypatch.setenv(f"{webhook.PREFIX}NAMESPACE", "n")
    monkeypatch.setenv(f"{monitor.PREFIX}NODE_NAME", "n")
    monkeypatch.setenv(part.PREFIX + name, value)
    with pytest.raises(UsageError) as refused:
        part.load()
    assert str(refused.value) == f"{part.PREFIX}{name}: {line}"


@pytest.mark.parametrize("part", [webhook, monitor], ids=["webhook", "monitor"])
def test_an_address_is_explained_without_a_port_of_another_part(part: Any) -> None:
    """Both parts have a default of their own, so the line names no number."""
    with pytest.raises(UsageError, match="is not host:port: write ") as refused:
        part.load(listen="9394", namespace="n", node_name="n")
    assert "8443" not in str(refused.value)


@pytest.mark.parametrize("part", [webhook, monitor], ids=["webhook", "monitor"])
def test_a_variable_that_no_setting_reads_is_named(part: Any) -> None:
    """A typing error with what it may mean; settings, other programs' and the kubelet's say nothing."""
    prefix = part.PREFIX
    good = {f"{prefix}LISTEN": "", f"{prefix}log_level".lower(): "", "PATH": ""}
    links = {f"{prefix}SERVICE_HOST": "", f"{prefix}PORT": "", f"{prefix}PORT_443_TCP_ADDR": ""}
    assert unknown(part.Settings, good | links) == []
    assert unknown(part.Settings, good | {f"{prefix}LOGLEVEL": "", f"{prefix}XYZZYX": ""}) == [
        f"{prefix}LOGLEVEL is no setting and is ignored: {prefix}LOG_LEVEL is one",
        f"{prefix}XYZZYX is no setting and is ignored",
    ]
