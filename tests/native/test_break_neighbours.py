"""Tenants that share a PID namespace but have regions of their own."""

from __future__ import annotations

import subprocess
import sys

import container
import pytest
from conftest import SimEnv

TENANT = """
from simclient import *
import sys
init(0)
print(alloc(3 << 30)[0], flush=True)
sys.stdin.readline()
"""
BOTH = """
import os, subprocess, sys
def start(cache):
    env = dict(os.environ, CUDA_DEVICE_MEMORY_SHARED_CACHE=cache)
    p = subprocess.Popen([sys.executable, "-c", sys.argv[1]], env=env, stdin=-1, stdout=-1, text=True)
    return p, p.stdout.readline().strip()
folder = sys.argv[2]
one, first = start(folder + "/cache2")
two, second = start(folder + "/cache")
for p in (one, two):
    p.communicate("\\n")
print(first, second)
"""


@pytest.mark.parametrize("namespace", [[], container.UNSHARE], ids=["host", "own"])
def test_neighbours_in_one_namespace_do_not_pay_for_each_other(
    sim_env: SimEnv, tmp_path: object, namespace: list[str]
) -> None:
    """Programs with region files of their own are tenants of their own, in any PID namespace."""
    if namespace and container.why_not():
        pytest.skip(container.why_not())
    env = sim_env(preload=True, limit="4147m")
    command = [*namespace, sys.executable, "-c", BOTH, TENANT, str(tmp_path)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    assert done.stdout == "0 0\n", done.stderr
