"""The real Helm, 3 and 4, and the objects that it renders.

The binaries come from `make cluster-tools` (helm3 and helm4); without them `helm` on PATH is taken.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parent.parent.parent
CHART = ROOT / "charts" / "kai-resource-isolator"
CI_VALUES = sorted((CHART / "ci").glob("*-values.yaml"))
RELEASE = NAMESPACE = "kai-resource-isolator"
KUBE_VERSION = "1.35.0"

Object = dict[str, Any]


def _binaries() -> dict[str, str]:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / RELEASE / "bin"
    found = {name: str(cache / name) for name in ("helm3", "helm4") if (cache / name).exists()}
    on_path = shutil.which("helm")
    return found or ({"helm": on_path} if on_path else {})


BINARIES = _binaries()
NO_HELM = "no Helm: run `make cluster-tools`, or put helm on PATH"


class Helm:
    """One Helm, kept away from the user's own settings and from any cluster."""

    def __init__(self, binary: str, home: Path) -> None:
        self.binary = binary
        self.env = {
            "PATH": os.environ["PATH"],
            "HOME": str(home),
            "KUBECONFIG": str(home / "no-kubeconfig"),
        }

    def run(self, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [self.binary, *arguments], env=self.env, capture_output=True, text=True, timeout=60
        )
        if check and done.returncode:
            pytest.fail(f"helm {' '.join(arguments)}: {done.stderr}")
        return done

    def template(
        self, *arguments: str, release: str = RELEASE, check: bool = True
    ) -> subprocess.CompletedProcess[str]:
        command = ["template", release, str(CHART), "-n", NAMESPACE, "--kube-version", KUBE_VERSION]
        return self.run(*command, *arguments, check=check)


class Rendered:
    """The objects of one render, found by kind and name."""

    def __init__(self, text: str) -> None:
        # libyaml takes a tenth of the time of the pure loader.
        loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
        self.objects: list[Object] = [item for item in yaml.load_all(text, Loader=loader) if item]

    def __iter__(self) -> Iterator[Object]:
        return iter(self.objects)

    def all(self, kind: str) -> list[Object]:
        return [item for item in self.objects if item["kind"] == kind]

    def one(self, kind: str, name: str | None = None) -> Object:
        found = [item for item in self.all(kind) if name is None or item["metadata"]["name"] == name]
        assert len(found) == 1, f"{len(found)} {kind} {name or ''}"
        return found[0]

    def names(self, kind: str) -> set[str]:
        return {item["metadata"]["name"] for item in self.all(kind)}

    def pod(self, kind: str, name: str) -> Object:
        """The pod spec of a workload."""
        spec: Object = self.one(kind, name)["spec"]["template"]["spec"]
        return spec


def env_of(container: Object) -> dict[str, str]:
    """Literal environment of a container, by name."""
    return {item["name"]: item["value"] for item in container["env"] if "value" in item}
