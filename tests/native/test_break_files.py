"""Region files on systems that lack what their making needs."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import RunClient, SimEnv

FALLOCATE = """
#include <errno.h>
int fallocate(int fd, int mode, long at, long size) { errno = EPERM; return -1; }
int fallocate64(int fd, int mode, long at, long size) { errno = EPERM; return -1; }
"""
LOCKS = """
#include <errno.h>
#include <stdarg.h>
#include <sys/syscall.h>
#include <unistd.h>
int fcntl(int fd, int command, ...) {
    va_list list;
    va_start(list, command);
    void *argument = va_arg(list, void *);
    va_end(list);
    if (command >= 36 && command <= 38) {
        errno = EINVAL;
        return -1;
    }
    return (int)syscall(SYS_fcntl, fd, command, argument);
}
int fcntl64(int fd, int command, ...) __attribute__((alias("fcntl")));
"""


@pytest.fixture
def without(tmp_path: Path) -> Callable[[str], str]:
    """Makes a library that takes a system call away when it is preloaded behind ours."""

    def make(source: str) -> str:
        path = tmp_path / "without.so"
        command = ["gcc", "-shared", "-fPIC", "-w", "-x", "c", "-", "-o", str(path)]
        subprocess.run(command, input=source, text=True, check=True)
        return str(path)

    return make


def test_a_sandbox_without_fallocate_has_the_region_written_out(
    sim_env: SimEnv, run_client: RunClient, without: Callable[[str], str], tmp_path: Path
) -> None:
    """Where fallocate is forbidden every block is written instead: the region is there, and whole."""
    env = sim_env(preload=True, limit="1g")
    env["LD_PRELOAD"] += ":" + without(FALLOCATE)
    assert run_client("from simclient import *; init(0); expect(OOM, alloc(1 << 30))", env).stderr == ""
    found = (tmp_path / "usage.cache").stat()
    assert found.st_blocks * 512 >= found.st_size > 2_000_000


def test_a_system_without_the_locks_is_refused_by_that_name(
    sim_env: SimEnv, run_client: RunClient, without: Callable[[str], str]
) -> None:
    """A kernel that has no locks of open files ends in a refusal that does not blame the limit."""
    env = sim_env(preload=True, limit="1g")
    env["LD_PRELOAD"] += ":" + without(LOCKS)
    said = run_client("from simclient import *; expect(NOT_PERMITTED, cu_init())", env).stderr
    assert "No locks available" in said
    assert "malformed" not in said
