"""A node: a box with its own containerd and kubelet, and its own /var, /run, /opt and /usr/local.

What pods write to those places of "the host" stays in the node's folder and never reaches this machine.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from boxes import Box, Program, wait_for
from bridge import API_SERVICE, Addresses, switch
from controlplane import ControlPlane

SOCKET = "/run/containerd/containerd.sock"
OWN = ("var", "run", "opt", "usr/local")
# A new folder in /home (COS nodes have /home/kubernetes) is the node's own; those that are there stay.
_HOME = """
for each in /home/*/; do
    place="{own}/${{each#/home/}}"
    [ ! -d "$each" ] || {{ mkdir -p "$place" && mount --rbind "$each" "$place"; }}
done
mount --rbind {own} /home"""
# Values that a kubelet sets for the whole machine: it finds them set, on files that only its node sees.
KERNEL = {
    "vm/overcommit_memory": "1",
    "vm/panic_on_oom": "0",
    "kernel/panic": "10",
    "kernel/panic_on_oops": "1",
    "kernel/keys/root_maxkeys": "1000000",
    "kernel/keys/root_maxbytes": "25000000",
}
_CONTAINERD = """
version = 2
root = "/var/lib/containerd"
state = "/run/containerd"
[grpc]
  address = "{socket}"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{pause}"
  disable_apparmor = true
  # CAP_SYS_RESOURCE may be missing: a score below this process's own is then refused.
  restrict_oom_score_adj = true
  max_concurrent_downloads = 1
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "/usr/lib/cni"
    conf_dir = "{folder}/cni"
  [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
    runtime_type = "io.containerd.runc.v2"
  # The handler that KAI's runtime class names.
  [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.nvidia]
    runtime_type = "io.containerd.runc.v2"
"""


class Node:
    """Node `n<number>` of a cluster."""

    def __init__(self, number: int, box: Box, at: Addresses, control: ControlPlane, folder: Path) -> None:
        self.number, self.box, self.at, self.control, self.folder = number, box, at, control, folder
        self.name = box.name
        self.address = at.node(number)
        self.containerd: Program | None = None
        self.kubelet: Program | None = None

    def prepare(self, pause: str) -> None:
        """Mounts and configuration files; the box is plugged in already."""
        for name in (*(f"own/{place}" for place in OWN), "own/home", "cni", "kernel"):
            (self.folder / name).mkdir(parents=True)
        steps = ["set -e"]
        steps += [f"mount --bind {self.folder}/own/{place} /{place}" for place in OWN]
        steps.append(_HOME.format(own=f"{self.folder}/own/home"))
        steps += [
            "mkdir -p /var/lib /var/log /var/tmp /run/lock",
            "chmod 1777 /var/tmp",
            "ln -s /run /var/run",
        ]
        for key, value in KERNEL.items():
            fake = self.folder / "kernel" / key.replace("/", "-")
            fake.write_text(f"{value}\n")
            steps.append(f"! test -e /proc/sys/{key} || mount --bind {fake} /proc/sys/{key}")
        # A kubelet wants volumes mounted later to be seen in running containers.
        steps += ["mount --make-rshared /", f"ip route add {API_SERVICE}/32 via {self.at.control}"]
        self.box.run(["sh", "-c", "\n".join(steps)])
        containerd = _CONTAINERD.format(socket=SOCKET, pause=pause, folder=self.folder)
        (self.folder / "containerd.toml").write_text(containerd)
        (self.folder / "cni/10-bridge.conflist").write_text(json.dumps(self._cni()))
        (self.folder / "kubelet.yaml").write_text(json.dumps(self._kubelet()))
        self.kubeconfig = self.control.ca.kubeconfig(
            f"kubelet-{self.name}", self.control.server, f"system:node:{self.name}", "system:nodes"
        )

    def _cni(self) -> dict[str, object]:
        ipam = {
            "type": "host-local",
            "ranges": [[{"subnet": self.at.pods(self.number)}]],
            "routes": [{"dst": "0.0.0.0/0"}],
        }
        bridge = {"type": "bridge", "bridge": "cni0", "isGateway": True, "hairpinMode": True, "ipam": ipam}
        return {"cniVersion": "0.4.0", "name": "pods", "plugins": [bridge]}

    def _kubelet(self) -> dict[str, object]:
        crt, key = self.control.ca.sign(f"serving-{self.name}", self.name, hosts=[self.name, self.address])
        return {
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "authentication": {
                "anonymous": {"enabled": False},
                "webhook": {"enabled": True},
                "x509": {"clientCAFile": str(self.control.ca.path)},
            },
            "authorization": {"mode": "Webhook"},
            "tlsCertFile": str(crt),
            "tlsPrivateKeyFile": str(key),
            "address": self.address,
            "readOnlyPort": 0,
            "containerRuntimeEndpoint": f"unix://{SOCKET}",
            # Hybrid cgroups, as on this machine: v1 controllers, no tree of QoS classes.
            "failCgroupV1": False,
            "cgroupDriver": "cgroupfs",
            "cgroupsPerQOS": False,
            "enforceNodeAllocatable": [],
            "failSwapOn": False,
            "makeIPTablesUtilChains": False,
            "evictionHard": {"memory.available": "10Mi", "nodefs.available": "1%", "imagefs.available": "1%"},
            "imageGCHighThresholdPercent": 100,
            "resolvConf": "",
            "serializeImagePulls": False,
            "syncFrequency": "2s",
            "nodeStatusUpdateFrequency": "2s",
            "nodeStatusReportFrequency": "10s",
            "nodeLeaseDurationSeconds": 8,
        }

    def start_containerd(self) -> None:
        """Starts the container runtime and returns at once."""
        self.containerd = self.box.start(["containerd", "--config", self.folder / "containerd.toml"])

    def load_image(self, archive: Path) -> None:
        """Imports an archive (`docker save` or OCI layout as tar) into the node's containerd."""
        assert self.containerd

        def up() -> bool:
            assert self.containerd
            self.containerd.check()
            return self.ctr("version", check=False).returncode == 0

        wait_for(up, 30, f"containerd of {self.name}")
        with archive.open("rb") as stream:
            self.ctr("images", "import", "--snapshotter=overlayfs", "-", stdin=stream.fileno(), timeout=300)

    def ctr(self, *words: str | Path, **options: object) -> subprocess.CompletedProcess[str]:
        """Runs `ctr` on the node, in the kubelet's namespace of images and containers."""
        return self.box.run(["ctr", "--namespace=k8s.io", *words], **options)  # type: ignore[arg-type]

    def start_kubelet(self) -> None:
        """Starts the kubelet and returns at once."""
        self.kubelet = self.box.start(
            [
                self.control.programs / "kubelet",
                f"--config={self.folder / 'kubelet.yaml'}",
                f"--kubeconfig={self.kubeconfig}",
                f"--hostname-override={self.name}",
                f"--node-ip={self.address}",
                "--root-dir=/var/lib/kubelet",
            ]
        )

    def stop_kubelet(self) -> None:
        """Stops the kubelet alone: containers go on."""
        if self.kubelet:
            self.kubelet.stop()

    def cut(self) -> None:
        """Cuts the node off from everything: its pods, its kubelet, all of it."""
        switch(self.at, self.name, False)

    def heal(self) -> None:
        """Connects a node that was cut off."""
        switch(self.at, self.name, True)

    def run(self, command: list[str] | str, **options: object) -> subprocess.CompletedProcess[str]:
        """Runs a command (a list, or text for the shell) as root on the node; its result as text."""
        argv = ["sh", "-c", command] if isinstance(command, str) else command
        return self.box.run(argv, **options)  # type: ignore[arg-type]

    def path(self, inside: str | Path) -> Path:
        """Where a path of the node is found from here, its mounts included; valid while the node is up."""
        return self.box.path(inside)
