"""Fixtures of the chart tests; the helpers are in charting.py."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
from charting import BINARIES, NO_HELM, RELEASE, Helm, Rendered


@pytest.fixture(scope="session", params=sorted(BINARIES) or ["none"])
def each_helm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Helm:
    """Helm 3, then Helm 4."""
    if not BINARIES:
        pytest.skip(NO_HELM)
    return Helm(BINARIES[request.param], tmp_path_factory.mktemp("helm"))


@pytest.fixture(scope="session")
def helm(tmp_path_factory: pytest.TempPathFactory) -> Helm:
    """The newest Helm."""
    if not BINARIES:
        pytest.skip(NO_HELM)
    return Helm(BINARIES[max(BINARIES)], tmp_path_factory.mktemp("helm"))


@pytest.fixture(scope="session")
def render(helm: Helm) -> Any:
    """`render("monitor.enabled=true", files=(...,))` -> Rendered; each argument is a --set-json."""

    @functools.cache
    def cached(sets: tuple[str, ...], files: tuple[str, ...], release: str, more: tuple[str, ...]) -> str:
        arguments = [part for item in sets for part in ("--set-json", item)]
        arguments += [part for item in files for part in ("-f", item)]
        return helm.template(*arguments, *more, release=release).stdout

    def call(
        *sets: str, files: tuple[Path, ...] = (), release: str = RELEASE, more: tuple[str, ...] = ()
    ) -> Rendered:
        return Rendered(cached(sets, tuple(map(str, files)), release, more))

    return call
