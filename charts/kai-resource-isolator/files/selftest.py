"""`helm test`: asks the webhook for the admission of the lab's pod, and each monitor for its metrics."""

import base64
import json
import os
import re
import socket
import ssl
import sys
import time
import urllib.request

WEBHOOK, MONITOR, MOUNT = os.environ["WEBHOOK"], os.environ["MONITOR"], os.environ["MOUNT"]
CA, PATIENCE = os.environ.get("CA", "/ca/ca.crt"), float(os.environ.get("PATIENCE", "60"))
POD = {
    "apiVersion": "v1",
    "kind": "Pod",
    "metadata": {"name": "helm-test", "annotations": {"gpu-memory": "4096"}},
    "spec": {
        "schedulerName": os.environ["SCHEDULER"],
        "containers": [{"name": "cuda", "image": "none", "resources": {}}],
    },
}
REQUEST = {
    "uid": "helm-test",
    "kind": {"group": "", "version": "v1", "kind": "Pod"},
    "resource": {"group": "", "version": "v1", "resource": "pods"},
    "namespace": "default",
    "operation": "CREATE",
    "dryRun": True,
    "object": POD,
}


def ask(url, body=None):
    trusted = os.path.exists(CA)
    context = ssl.create_default_context(cafile=CA) if trusted else ssl._create_unverified_context()
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=5, context=context) as answer:
        return answer.read().decode()


def webhook():
    """The lab's pod comes back with the library, at the chart's own path."""
    ask(f"https://{WEBHOOK}/readyz")
    review = {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": REQUEST}
    response = json.loads(ask(f"https://{WEBHOOK}/mutate", json.dumps(review).encode()))["response"]
    patch = base64.b64decode(response.get("patch", "")).decode()
    if not response["allowed"] or f"{MOUNT}/libvgpu.so" not in patch:
        raise ValueError(f"the pod was not injected: {response.get('status') or response.get('warnings')}")
    return f"webhook {WEBHOOK}: injects"


def monitors():
    """Each node's monitor answers."""
    host, port = MONITOR.rsplit(":", 1)
    try:
        found = {row[4][0] for row in socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)}
    except socket.gaierror:
        return f"monitor {host}: no pods (no node matches monitor.nodeSelector?)"
    for address in sorted(found):
        shown = f"[{address}]" if ":" in address else address
        if not re.search(r"^kai_isolator_up(\{.*\})? 1(\.0)?$", ask(f"http://{shown}:{port}/metrics"), re.M):
            raise ValueError(f"{address} serves no kai_isolator_up 1")
    return f"monitor {host}: {len(found)} answer"


def main():
    for check in [webhook] + ([monitors] if MONITOR else []):
        end = time.monotonic() + PATIENCE
        while True:
            try:
                print(check())
                break
            except Exception as error:
                if time.monotonic() > end:
                    sys.exit(f"{check.__name__}: {error}")
                time.sleep(2)


main()
