"""librarySync.libraryTag: the nodes get the library of another release, everything else stays."""

from __future__ import annotations

import json
from typing import Any

import pytest
from charting import RELEASE, Helm

from isolator import names
from isolator.libsync.uninstall import patch_of

LIBSYNC = f"{RELEASE}-libsync"
DIGEST = "sha256:" + "0123456789abcdef" * 4
OTHER = 'librarySync.libraryTag="1.1.9"'


def test_one_value_takes_the_library_of_another_image(render: Any) -> None:
    """An init container of that image hands over its library and version; all workloads keep their image and
    nothing but libsync's pod changes."""
    plain, changed = render(), render(OTHER)
    pod = changed.pod("DaemonSet", LIBSYNC)
    (giver,), (container,) = pod["initContainers"], pod["containers"]
    assert giver["image"] == "kai-resource-isolator:1.1.9"
    assert container["image"] == plain.pod("DaemonSet", LIBSYNC)["containers"][0]["image"]
    folder = {mount["name"]: mount for mount in giver["volumeMounts"]}
    assert set(folder) == {"library"}, "the other image sees nothing of the node"
    assert giver["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    mine = {mount["name"]: mount for mount in container["volumeMounts"]}["library"]
    assert mine == {**folder["library"], "readOnly": True}
    where = mine["mountPath"]
    assert {f"--library={where}/{names.LIBRARY_FILE}", f"--version-file={where}/version"} < {
        *container["command"]
    }
    assert "--library=auto" not in container["command"]
    others = [
        [item for item in told if item["metadata"]["name"] != LIBSYNC or item["kind"] != "DaemonSet"]
        for told in (plain, changed)
    ]
    assert others[0] == others[1]
    assert "initContainers" not in plain.pod("DaemonSet", LIBSYNC)


@pytest.mark.parametrize(
    ("values", "image"),
    [
        ([OTHER, f'image.digest="{DIGEST}"'], "kai-resource-isolator:1.1.9"),
        ([OTHER, f'librarySync.libraryDigest="{DIGEST}"'], f"kai-resource-isolator:1.1.9@{DIGEST}"),
        ([OTHER, 'image.registry="r.example.com"', 'image.repository="a/b"'], "r.example.com/a/b:1.1.9"),
        ([OTHER, 'global.imageRegistry="mirror"'], "mirror/kai-resource-isolator:1.1.9"),
    ],
)
def test_it_comes_from_the_same_repository(render: Any, values: list[str], image: str) -> None:
    """Registry and repository are the release's; a digest of the release's image is not the other one's."""
    (giver,) = render(*values).pod("DaemonSet", LIBSYNC)["initContainers"]
    assert giver["image"] == image


@pytest.mark.parametrize("value", ["librarySync.libraryTag=a b", "librarySync.libraryDigest=sha256:1"])
def test_what_cannot_name_an_image_is_refused(helm: Helm, value: str) -> None:
    """One line of the schema, nothing rendered."""
    done = helm.template("--set-string", value, check=False)
    assert done.returncode and value.partition("=")[0].partition(".")[2] in done.stderr


def test_a_removal_does_not_wait_for_the_other_image(render: Any) -> None:
    """The hook's patch takes the init container out: its image may be gone by then."""
    daemonset = render(OTHER).one("DaemonSet")
    patch = patch_of(daemonset)
    assert patch is not None and patch["spec"]["template"]["spec"]["initContainers"] is None
    bare = patch_of(render().one("DaemonSet"))
    assert "initContainers" not in json.dumps(bare)
