"""etcd, API server, controller manager and scheduler in one box; pods find them at 10.96.0.1:443."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from boxes import Box, ClusterError, Program, sh, wait_for
from bridge import API_SERVICE, Addresses
from pki import Authority

SERVICES = "10.96.0.0/24"
SYSTEM = {
    "kcm": ("system:kube-controller-manager", ""),
    "scheduler": ("system:kube-scheduler", ""),
    "admin": ("kubernetes-admin", "system:masters"),
}
# Pod admission in full (which webhook patched what); of the rest only who did it.
AUDIT = {
    "apiVersion": "audit.k8s.io/v1",
    "kind": "Policy",
    "omitStages": ["RequestReceived"],
    "rules": [
        {"level": "Request", "verbs": ["create"], "resources": [{"group": "", "resources": ["pods"]}]},
        {"level": "None", "verbs": ["get", "list", "watch"]},
        {
            "level": "None",
            "resources": [{"group": "coordination.k8s.io"}, {"group": "", "resources": ["events"]}],
        },
        {"level": "Metadata"},
    ],
}


class ControlPlane:
    """The servers of a cluster; `folder` keeps their data and the kubeconfigs."""

    def __init__(self, box: Box, at: Addresses, folder: Path, programs: Path) -> None:
        self.box, self.at, self.folder, self.programs = box, at, folder, programs
        self.running: dict[str, Program] = {}
        self.server = f"https://{at.control}:443"
        self.ca = Authority(folder / "pki")
        self.kubeconfigs = {
            name: self.ca.kubeconfig(name, self.server, *identity) for name, identity in SYSTEM.items()
        }
        names = ("kubernetes", "kubernetes.default", "kubernetes.default.svc")
        hosts = (*names, "kubernetes.default.svc.cluster.local", at.control, API_SERVICE, "127.0.0.1")
        self.ca.sign("apiserver", "kube-apiserver", hosts=hosts)
        self.ca.sign("kubelet-client", "kube-apiserver", "system:masters")
        self.ca.sign("front-proxy", "front-proxy")
        self.audit_log = folder / "audit.log"
        (folder / "audit.yaml").write_text(json.dumps(AUDIT))
        box.run(["ip", "addr", "add", f"{API_SERVICE}/32", "dev", "lo"])

    def start(self) -> None:
        """Starts etcd and the API server and returns at once; `wait` waits for them."""
        self.running["etcd"] = self.box.start(
            [
                self.programs / "etcd",
                f"--data-dir={self.folder / 'etcd'}",
                "--unsafe-no-fsync",
                "--log-level=warn",
            ]
        )
        self.start_apiserver()

    def start_apiserver(self) -> None:
        pki = self.folder / "pki"
        self.running["kube-apiserver"] = self.box.start(
            [
                self.programs / "kube-apiserver",
                "--etcd-servers=http://127.0.0.1:2379",
                "--bind-address=0.0.0.0",
                "--secure-port=443",
                f"--advertise-address={self.at.control}",
                f"--service-cluster-ip-range={SERVICES}",
                f"--tls-cert-file={pki / 'apiserver.crt'}",
                f"--tls-private-key-file={pki / 'apiserver.key'}",
                f"--client-ca-file={self.ca.path}",
                f"--kubelet-certificate-authority={self.ca.path}",
                f"--kubelet-client-certificate={pki / 'kubelet-client.crt'}",
                f"--kubelet-client-key={pki / 'kubelet-client.key'}",
                "--kubelet-preferred-address-types=InternalIP",
                f"--requestheader-client-ca-file={self.ca.path}",
                "--requestheader-allowed-names=front-proxy",
                "--requestheader-extra-headers-prefix=X-Remote-Extra-",
                "--requestheader-group-headers=X-Remote-Group",
                "--requestheader-username-headers=X-Remote-User",
                f"--proxy-client-cert-file={pki / 'front-proxy.crt'}",
                f"--proxy-client-key-file={pki / 'front-proxy.key'}",
                # No kube-proxy here: webhooks named by Service are called at their pods' addresses.
                "--enable-aggregator-routing=true",
                "--authorization-mode=Node,RBAC",
                "--enable-admission-plugins=NodeRestriction",
                "--allow-privileged=true",
                f"--service-account-key-file={pki / 'sa.pub'}",
                f"--service-account-signing-key-file={pki / 'sa.key'}",
                "--service-account-issuer=https://kubernetes.default.svc.cluster.local",
                f"--audit-policy-file={self.folder / 'audit.yaml'}",
                f"--audit-log-path={self.audit_log}",
                "--audit-log-mode=blocking",
                "--shutdown-delay-duration=0s",
            ]
        )

    def start_controllers(self) -> None:
        """The controller manager and the scheduler, for an API server that is ready."""
        pki = self.folder / "pki"
        self.running["kcm"] = self.box.start(
            [
                self.programs / "kube-controller-manager",
                f"--kubeconfig={self.kubeconfigs['kcm']}",
                f"--service-account-private-key-file={pki / 'sa.key'}",
                f"--root-ca-file={self.ca.path}",
                f"--cert-dir={self.folder / 'kcm'}",
                "--use-service-account-credentials=true",
                "--bind-address=127.0.0.1",
                "--leader-elect=false",
                # Above the kubelets' heartbeat of 2 s with much room: this machine may be busy.
                "--node-monitor-grace-period=12s",
                "--node-monitor-period=2s",
            ],
            name="kcm",
        )
        self.running["scheduler"] = self.box.start(
            [
                self.programs / "kube-scheduler",
                f"--kubeconfig={self.kubeconfigs['scheduler']}",
                f"--cert-dir={self.folder / 'scheduler'}",
                "--bind-address=127.0.0.1",
                "--leader-elect=false",
            ],
            name="scheduler",
        )

    def ready(self) -> bool:
        """Whether the API server says so; raises where a server has ended."""
        for program in self.running.values():
            program.check()
        kubectl = [self.programs / "kubectl", f"--kubeconfig={self.kubeconfigs['admin']}"]
        try:
            return sh(*kubectl, "get", "--raw=/readyz", timeout=10) == "ok"
        except (ClusterError, TimeoutError):
            return False

    def wait(self, timeout: float = 60) -> None:
        wait_for(self.ready, timeout, "the API server to be ready", every=0.3)

    def restart_apiserver(self) -> None:
        """Stops the API server, starts it again and waits until it is ready."""
        # It waits for open watches; what it stored is in etcd.
        self.running["kube-apiserver"].stop(timeout=3)
        self.start_apiserver()
        time.sleep(0.5)
        self.wait()

    def audit(self) -> Iterator[dict[str, Any]]:
        """The audit events so far, oldest first."""
        if not self.audit_log.exists():
            return
        for line in self.audit_log.read_text().splitlines():
            if line.endswith("}"):
                yield json.loads(line)
