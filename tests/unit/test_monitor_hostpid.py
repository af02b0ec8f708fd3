"""From a process of the host to its container, by control group."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from isolator.monitor import hostpid
from isolator.monitor.hostpid import Owner

UID = "6e1b2c3d-aaaa-bbbb-cccc-0123456789ab"
SYSTEMD_UID = UID.replace("-", "_")
ID = "0123456789abcdef" * 4
OTHER_ID = "f" * 64
SLICE = f"kubepods-burstable-pod{SYSTEMD_UID}.slice"


@pytest.mark.parametrize(
    ("text", "owner"),
    [
        (f"0::/kubepods/burstable/pod{UID}/{ID}\n", Owner(UID, ID)),
        (f"0::/kubepods/pod{UID}/{ID}\n", Owner(UID, ID)),
        (f"0::/pod{UID}/{ID}\n", Owner(UID, ID)),
        (f"0::/kubepods.slice/kubepods-burstable.slice/{SLICE}/cri-containerd-{ID}.scope\n", Owner(UID, ID)),
        (f"0::/../../{SLICE}/crio-{ID}.scope\n", Owner(UID, ID)),
        (f"0::/../pod{UID}/{ID}\n", Owner(UID, ID)),
        (f"0::/kubepods/besteffort/pod{UID}/{ID}/init\n", Owner(UID, ID)),
        (f"12:pids:/\n5:memory:/kubepods/besteffort/pod{UID}/{ID}\n0::/\n", Owner(UID, ID)),
        (
            f"11:cpu,cpuacct:/kubepods.slice/kubepods-pod{SYSTEMD_UID}.slice/docker-{ID}.scope\n",
            Owner(UID, ID),
        ),
        (f"0::/kubepods/burstable/pod{'a' * 32}/{ID}\n", Owner("a" * 32, ID)),
        (f"0::/system.slice/{SLICE}:cri-containerd:{ID}\n", Owner(UID, ID)),
        (f"5:memory:/k8s.io/{ID}\n", Owner(None, ID)),
        ("0::/system.slice/containerd.service\n", None),
        (f"0::/kubepods/burstable/pod{UID}\n", None),
        (f"0::/kubepods/pod{UID}/pod{'b' * 32}/{ID}\n", Owner(UID, ID)),
        ("0::/\n", None),
        ("", None),
        ("rubbish\n\n::::\n", None),
    ],
)
def test_owner_is_read_from_every_form_of_group_name(text: str, owner: Owner | None) -> None:
    """Each form that kubelets and runtimes use gives pod UID and container id; host processes give none."""
    assert owner == hostpid.parse(text)


def test_groups_that_a_tenant_makes_below_its_own_do_not_count() -> None:
    """A nested group with another pod's names does not hand the process to that pod."""
    forged = f"0::/kubepods/pod{UID}/{ID}/kubepods/pod{'b' * 32}/{OTHER_ID}\n"

    assert Owner(UID, ID) == hostpid.parse(forged)


def test_owner_of_a_process_that_is_gone_is_unknown(tmp_path: Path) -> None:
    """A process that ended between two looks is no error."""
    assert hostpid.owner(4711, tmp_path) is None


def test_owner_is_read_below_the_given_root(tmp_path: Path) -> None:
    """The process table's root is an argument."""
    (tmp_path / "4711").mkdir()
    (tmp_path / "4711" / "cgroup").write_text(f"0::/kubepods/pod{UID}/{ID}\n")

    assert Owner(UID, ID) == hostpid.owner(4711, tmp_path)


def test_a_real_process_table_is_readable() -> None:
    """The real file of this process parses without an error."""
    hostpid.owner(os.getpid())
