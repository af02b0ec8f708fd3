"""Neighbours in one region: full tables, other PID namespaces, other users."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

import pytest
from corelib import GIB, LIMIT, MIB, Core, client, forge

root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


@pytest.fixture
def path(tmp_path):
    """Where the region is."""
    return tmp_path / "region"


@pytest.fixture
def core(path):
    """This process's slot, number 0."""
    with Core(path, claim=True) as made:
        made.limit(LIMIT)
        yield made


def test_table_of_dead_slots_is_used_again(core, path):
    """1,024 dead slots hold nobody up (W-B6)."""
    for slot in range(1, 1024):
        forge(core, slot, 4_000_000 + slot, 77, MIB)
    core.region.proc_num = 1024
    core.charge(GIB)
    with Core(path, claim=True) as other:
        assert other.slot == 1
        other.limit(LIMIT)
        assert other.charge(3 * GIB)
        assert not other.charge(1)
    assert core.used() == GIB


def test_full_table_is_told(path):
    """With 1,024 live slots the next process is told so, and a freed one is found."""
    held = [Core(path, claim=True) for _ in range(1024)]
    assert sorted(one.slot for one in held) == list(range(1024))
    with Core(path) as late:
        with pytest.raises(OSError) as caught:
            late.claim()
        assert caught.value.errno == errno.EUSERS
        held.pop(500).close()
        assert late.claim() == 500
        with pytest.raises(OSError) as caught:
            late.claim()
        assert caught.value.errno == errno.EALREADY
    for one in held:
        one.close()


def test_settle_lock_of_a_former_owner_goes_with_its_slot(core, path):
    """Who claims a slot is not taken for the holder of a lock that its predecessor left."""
    core.ext.lock = 2
    with Core(path, claim=True) as other:
        assert other.slot == 1
        assert core.ext.lock == 0


@root
@pytest.mark.root
@pytest.mark.skipif(not shutil.which("unshare"), reason="needs unshare")
def test_nested_pid_namespace_is_a_neighbour(core, path):
    """Processes that cannot see each other's PIDs count each other, live and dead (B040)."""
    if subprocess.run(["unshare", "-pf", "--mount-proc", "true"], capture_output=True).returncode:
        pytest.skip("PID namespaces are not allowed here")
    core.charge(GIB)
    with client("unshare", "-pf", "--mount-proc", "--kill-child") as other:
        assert other.pid == 1
        assert other.join(path, LIMIT) == 1
        assert core.region.procs[1].pid == 1
        assert other("core.charge(2 * GIB)")
        assert core.sweep() == other("core.sweep()") == 0
        assert core.live(1)
        assert other("core.live(0)")
        assert core.used() == other("core.used()") == 3 * GIB
    deadline = time.monotonic() + 2
    while core.used() != GIB and time.monotonic() < deadline:
        time.sleep(0.01)
    assert core.used() == GIB


@root
@pytest.mark.root
@pytest.mark.parametrize("users", [(0, 1024), (1024, 0), (1024, 1025)])
def test_users_share_one_file(users):
    """Whoever makes the region, every user of the container can use it, whatever the umask (B141)."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        os.chmod(folder, 0o1777)
        path = Path(folder) / "region"
        with client() as first, client() as second:
            for number, (user, one) in enumerate(zip(users, (first, second), strict=True)):
                one("os.umask(0o077)")
                one(f"os.setuid({user})")
                assert one.join(path, LIMIT) == number
                assert one("core.charge(GIB)")
            assert first("core.used()") == second("core.used()") == 2 * GIB
            first.end()
            assert second("core.sweep()") == 1
            assert second("core.used()") == GIB
        assert path.stat().st_mode & 0o777 == 0o666
