"""A real Kubernetes cluster on this machine, for tests.

    cluster = Cluster(index=0)
    cluster.up()
    cluster.apply([pod]); cluster.wait_pod("p"); cluster.logs("p"); cluster.exec_("p", ["id"])
    cluster.down()

The control plane and the nodes n1 and n2 are boxes of namespaces joined by a bridge. All names and subnets
are derived from `index`: clusters of different indexes run side by side, two of one index do not.
`tools/build` makes the programs.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import baseimages
import bridge
from boxes import Box, ClusterError, end, sh, started, wait_for
from controlplane import ControlPlane
from nodes import OWN, Node
from verbs import PROGRAMS, Verbs

__all__ = ["Cluster", "ClusterError", "wait_for", "why_not"]

NEEDED = "kube-apiserver kube-controller-manager kube-scheduler kubelet kubectl etcd helm3 helm4".split()
SYSTEM = "containerd runc ctr ip nsenter unshare gcc iptables".split()
STATE = Path("/run/kai-resource-isolator-tests")


def why_not() -> str:
    """Empty where a cluster can be made, else the one reason."""
    if os.geteuid() != 0:
        return "not root, which a cluster needs: run `make cluster-tools` and the tests as root"
    missing = [name for name in NEEDED if not os.access(PROGRAMS / name, os.X_OK)]
    missing += [name for name in SYSTEM if not shutil.which(name)]
    missing += [
        str(path) for path in (baseimages.BUSYBOX_PROGRAM, Path("/usr/lib/cni/bridge")) if not path.exists()
    ]
    return f"no {', '.join(missing)}: run `make cluster-tools`" if missing else ""


class Cluster(Verbs):
    """A cluster of `nodes` nodes; its files lie in `root`, else in a temporary folder of its own."""

    def __init__(self, index: int | None = None, root: Path | None = None, nodes: int = 2) -> None:
        self.index = int(os.environ.get("CLUSTER_INDEX", "0")) if index is None else index
        if not 0 <= self.index <= bridge.MAX_INDEX:
            raise ClusterError(f"CLUSTER_INDEX is {self.index}: choose one from 0 to {bridge.MAX_INDEX}")
        self.at = bridge.Addresses(self.index)
        self.host_address = self.at.host
        self.count = nodes
        self.nodes: dict[str, Node] = {}
        self._given = root
        self._boxes: list[Box] = []
        self._lock: int | None = None

    def up(self, timeout: float = 120) -> None:
        """Brings the cluster up, nodes Ready, base images loaded; removes first what a killed run left."""
        reason = why_not()
        if reason:
            raise ClusterError(reason)
        self._claim()
        self._clean()
        self.root = self._folder()
        self.logs_folder = self.root / "logs"
        self.logs_folder.mkdir()
        self._note(f"root {self.root}")
        try:
            self._start(timeout)
        except BaseException:
            kept = Path(tempfile.mkdtemp(prefix=f"kri{self.index}-logs-"))
            self.collect_logs(kept)
            self.down()
            print(f"cluster {self.index} did not come up; logs are in {kept}")
            raise

    def _start(self, timeout: float) -> None:
        bridge.make(self.at)
        self.control = ControlPlane(
            self._box("control", self.at.control), self.at, self.root / "control", PROGRAMS
        )
        self.control.start()
        self.kubeconfig = self.control.kubeconfigs["admin"]
        images = self.root / "images"
        images.mkdir()
        for number in range(1, self.count + 1):
            box = self._box(f"n{number}", self.at.node(number))
            node = Node(number, box, self.at, self.control, self.root / box.name)
            node.prepare(baseimages.PAUSE)
            node.start_containerd()
            self.nodes[node.name] = node
        self._routes()
        for archive in (baseimages.pause(images), baseimages.busybox(images)):
            self.load_image(archive)
        self.control.wait(timeout)
        self.control.start_controllers()
        for node in self.nodes.values():
            node.start_kubelet()
        self.wait_nodes(timeout=timeout)
        self.wait_account(timeout=timeout)

    def _box(self, name: str, address: str) -> Box:
        box = Box(name, self.at.bridge, self.logs_folder, lambda pid: self._note(f"pid {pid} {started(pid)}"))
        self._boxes.append(box)
        bridge.plug(self.at, box, address)
        return box

    def _routes(self) -> None:
        """Every machine, this one included, reaches the pods of each node through the node."""
        for node in self.nodes.values():
            route = ["ip", "route", "replace", self.at.pods(node.number), "via", node.address]
            sh(*route)
            for box in self._boxes:
                if box is not node.box:
                    box.run(route)

    def down(self) -> None:
        """Ends and removes everything: processes, mounts, links, cgroups, files."""
        for box in self._boxes:
            end(box.holder.pid)
        for box in self._boxes:
            box.close()
        self._boxes, self.nodes = [], {}
        self._clean()
        if self._lock is not None:
            (STATE / f"{self.index}").unlink()
            os.close(self._lock)
            self._lock = None
            with contextlib.suppress(OSError):  # other clusters have notes there
                STATE.rmdir()

    def _claim(self) -> None:
        """Locks the notes of this index; a file that its owner took away meanwhile does not count."""
        notes = STATE / f"{self.index}"
        while self._lock is None:
            STATE.mkdir(exist_ok=True)
            lock = os.open(notes, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                os.close(lock)
                raise ClusterError(f"cluster {self.index} is in use: choose another CLUSTER_INDEX") from error
            if notes.exists() and os.path.samestat(os.fstat(lock), notes.stat()):
                self._lock = lock
            else:
                os.close(lock)

    def _note(self, line: str) -> None:
        assert self._lock is not None
        os.write(self._lock, f"{line}\n".encode())

    def _clean(self) -> None:
        """Removes what the notes of this index name; of processes only those that are still the same."""
        if self._lock is None:
            return
        notes = (STATE / f"{self.index}").read_text().splitlines()
        for note in notes:
            kind, _, rest = note.partition(" ")
            pid, _, when = rest.partition(" ")
            if kind == "pid" and when and started(int(pid)) == when:
                end(int(pid))
                wait_for(lambda pid=pid, when=when: started(int(pid)) != when, 20, f"process {pid} to end")
        bridge.remove(self.at)
        self._remove_cgroups()
        for note in notes:
            kind, _, rest = note.partition(" ")
            if kind == "root":
                subprocess.run(["rm", "-rf", "--one-file-system", rest], check=True)
        os.ftruncate(self._lock, 0)
        os.lseek(self._lock, 0, os.SEEK_SET)

    def _remove_cgroups(self) -> None:
        """A cgroup can be removed a moment after its last process is gone."""

        def gone() -> bool:
            left = [path for path in Path("/sys/fs/cgroup").glob(f"*/{self.at.bridge}")]
            left += [path for path in [Path("/sys/fs/cgroup") / self.at.bridge] if path.is_dir()]
            for top in left:
                subprocess.run(["find", top, "-depth", "-type", "d", "-delete"], capture_output=True)
            return not any(top.exists() for top in left)

        wait_for(gone, 20, "the cgroups to be removed", every=0.2)

    def _folder(self) -> Path:
        root = Path(tempfile.mkdtemp(prefix=f"kri{self.index}-", dir=self._given)).resolve()
        hidden = [place for place in OWN if root.is_relative_to(f"/{place}")]
        hidden += [place for place in OWN if PROGRAMS.resolve().is_relative_to(f"/{place}")]
        if hidden:
            raise ClusterError(f"nodes have their own /{hidden[0]}: put TMPDIR and XDG_CACHE_HOME elsewhere")
        root.chmod(0o755)
        return root
