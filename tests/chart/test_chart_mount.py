"""paths.containerVgpuMount: the same folders are refused as by the programs, each in a sentence."""

from __future__ import annotations

import re

import pytest

from isolator import mountpath

from .charting import CHART, Helm

HELPERS = (CHART / "templates" / "_helpers.tpl").read_text()


@pytest.mark.parametrize(
    ("helper", "paths"),
    [("systemFolders", mountpath.SYSTEM_FOLDERS), ("systemTrees", mountpath.SYSTEM_TREES)],
)
def test_the_chart_has_the_programs_lists(helper: str, paths: tuple[str, ...]) -> None:
    """Two copies of one list say the same."""
    found = re.search(rf'define "isolator.{helper}" -}}}}\n(.*)\n', HELPERS)
    assert found and tuple(found[1].split(" ")) == paths


@pytest.mark.parametrize(
    "path", ["/etc", "/usr/local", "/usr", "/run", "/run/a/b", "/etc/vgpu", "/var/run/vgpu"]
)
def test_system_folders_are_refused_in_the_programs_words(each_helm: Helm, path: str) -> None:
    """Not a pattern: what is wrong with it and what to write."""
    done = each_helm.template("--set", f"paths.containerVgpuMount={path}", check=False)
    line = (mountpath.fault(path) or "").replace("'", '"').replace("this node", "the nodes")
    assert done.returncode != 0 and f"paths.containerVgpuMount: {line}" in done.stderr, done.stderr


@pytest.mark.parametrize("path", ["usr/local/vgpu", "/a b/c", "/a:b/c", "//a/b", "/a/./b", "/a/$x", "/"])
def test_other_paths_are_refused_in_a_sentence(helm: Helm, path: str) -> None:
    """A path that a preload file, a mount or a shell would read otherwise."""
    done = helm.template("--set-string", f"paths.containerVgpuMount={path}", check=False)
    assert done.returncode != 0 and "is not an absolute, clean path" in done.stderr, done.stderr


@pytest.mark.parametrize("path", ["/vgpu", "/etcetera"])
def test_a_folder_of_the_root_is_refused(helm: Helm, path: str) -> None:
    """Read-only on many nodes, and the root itself belongs to nobody's product."""
    done = helm.template("--set", f"paths.containerVgpuMount={path}", check=False)
    assert done.returncode != 0 and "lies directly below /" in done.stderr, done.stderr
