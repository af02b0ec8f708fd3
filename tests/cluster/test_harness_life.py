"""A cluster that goes away: in order, or killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from baseimages import BUSYBOX
from harness import STATE, Cluster, ClusterError

HERE = Path(__file__).parent
# Far from the indexes that the session's clusters use.
SPARE = 39


def traces(folder: str) -> dict[str, list[str]]:
    """What of the spare cluster is left on this machine."""
    names = (f"kri{SPARE}-", folder)
    links = [line for line in os.listdir("/sys/class/net") if line.startswith(f"kri{SPARE}")]
    mounted = Path("/proc/self/mounts").read_text().splitlines()
    mounts = [line for line in mounted if any(name in line for name in names)]
    processes = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = entry.read_bytes().decode(errors="replace").replace("\0", " ")
        except OSError:
            continue
        if folder in words or f"kri{SPARE}/" in words:
            processes.append(words)
    groups = [str(path) for path in Path("/sys/fs/cgroup").glob(f"*/kri{SPARE}")]
    files = [str(path) for path in (Path(folder), STATE / str(SPARE)) if path.exists()]
    return {"links": links, "mounts": mounts, "processes": processes, "cgroups": groups, "files": files}


@pytest.mark.slow
def test_down_leaves_nothing_behind() -> None:
    """A cluster starts where an earlier run of its index was killed, and leaves nothing when it is down."""
    code = (
        f"import sys; sys.path.insert(0, {str(HERE)!r}); from harness import Cluster\n"
        f"c = Cluster({SPARE}, nodes=1); c.up(); print(c.root, flush=True); sys.stdin.read()"
    )
    killed = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert killed.stdout and killed.stdin
    first = killed.stdout.readline().strip()
    with pytest.raises(ClusterError, match="in use"):
        Cluster(SPARE).up()
    killed.send_signal(signal.SIGKILL)
    killed.wait(10)
    killed.stdout.close()
    killed.stdin.close()
    assert traces(first)["processes"] and traces(first)["links"]

    second = Cluster(SPARE, nodes=1)
    second.up()
    try:
        words = [f"--image={BUSYBOX}", "--image-pull-policy=Never", "--", "sleep", "600"]
        second.kubectl("run", "runs", *words)
        second.wait_pod("runs")
        folder = str(second.root)
        assert traces(folder)["processes"] and traces(folder)["cgroups"]
        assert not Path(first).exists()
    finally:
        second.down()

    assert traces(folder) == {"links": [], "mounts": [], "processes": [], "cgroups": [], "files": []}
    assert traces(first)["processes"] == []
