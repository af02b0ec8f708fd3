"""Causes that show from the API server: codes 60 to 99. What others follow from comes first."""

from __future__ import annotations

from typing import Final

from isolator.doctor.cause import Cause

_PODS = "kubectl describe pods -n {namespace} -l app.kubernetes.io/component="
_RECREATE = "recreate the pod"


def _row(identity: str, code: int, title: str, fix: str, notice: bool = False) -> Cause:
    return Cause(identity, code, title, fix, "cluster", notice)


CLUSTER: Final[tuple[Cause, ...]] = (
    _row("pod_missing", 60, "there is no such pod", "name it as --pod NAMESPACE/NAME"),
    _row(
        "image_pull",
        61,
        "a node cannot get our image",
        "push the image where nodes can pull it: image.repository, image.tag, global.imagePullSecrets",
    ),
    _row(
        "priority_class",
        62,
        "pods of ours are refused for their priority class",
        "leave the priorityClassName values empty (webhook, librarySync, monitor), or make class and quota",
    ),
    _row(
        "own_pod_security",
        63,
        "Pod Security refuses pods of ours",
        "kubectl label namespace {namespace} pod-security.kubernetes.io/enforce=privileged --overwrite",
    ),
    _row(
        "workload_refused",
        64,
        "pods of ours cannot be created",
        "do what the refusal asks: a ResourceQuota, a policy or another webhook stands against them",
    ),
    _row(
        "mount_differs",
        65,
        "the parts do not agree on the path of the library: it cannot be preloaded",
        "install again with the one value paths.containerVgpuMount, and recreate the pods of before",
    ),
    _row(
        "workload_failing", 66, "a pod of ours does not run", "kubectl logs -n {namespace} {pod} --previous"
    ),
    _row(
        "webhook_missing",
        67,
        "there is no webhook configuration of ours",
        "install the chart again: helm upgrade --install kai-resource-isolator",
    ),
    _row("webhook_down", 68, "no webhook answers", "{action}"),
    _row(
        "webhook_bundle",
        69,
        "caBundle is not the CA of the webhook's certificate",
        "built-in: its log names the right it lacks (rbac.create); else see cert-manager, or tls.caBundle",
    ),
    _row(
        "webhook_certificate",
        70,
        "the webhook's certificate is not good for its Service",
        "built-in: delete the Secret, it makes another; else renew it for SERVICE.NAMESPACE.svc",
    ),
    _row(
        "webhook_unreachable",
        71,
        "the API server cannot reach the webhook",
        "open port 8443 from the control plane to the pods, or set webhook.hostNetwork=true",
    ),
    _row(
        "webhook_skips",
        72,
        "a sharing pod would run without a quota",
        "webhook.failurePolicy=Fail, or webhook.admissionPolicy; is the namespace or scheduler left out?",
    ),
    _row(
        "kai_not_ready",
        73,
        "a part of KAI is not ready: queues and sharing pods are refused or wait",
        "wait for KAI's Deployments (kubectl get deploy -n kai-scheduler), then apply the queues again",
    ),
    _row(
        "kai_hamicore_off",
        74,
        "KAI gives no limits: its hamicore plugin is off",
        "global.gpuSharingMode=HamiCore; before KAI 0.18: global.gpuSharing, binder.plugins.hamicore.enabled",
    ),
    _row(
        "hami_platform",
        75,
        "the HAMi platform's webhook is here too",
        "keep HAMi off the GPU nodes that KAI shares, or remove it: both would share the same cards",
    ),
    _row(
        "runtime_class_missing",
        76,
        "the runtime class of sharing pods is missing",
        "create RuntimeClass {name} (GKE: handler runc), or KAI's admission.gpuFractionRuntimeClassName=''",
    ),
    _row(
        "nvml_not_found",
        77,
        "KAI's reservation pod does not find NVML",
        "set LD_LIBRARY_PATH=/usr/local/nvidia/lib64 on the pods of kai-resource-reservation, as Lab 12 does",
    ),
    _row(
        "reservation_failing",
        78,
        "a reservation pod of KAI does not run: no pod shares that card",
        "kubectl describe pod -n kai-resource-reservation {pod}",
    ),
    _row(
        "libsync_gap",
        79,
        "a GPU node has no installer",
        "librarySync.nodeSelector and tolerations must match that node",
    ),
    _row(
        "monitor_gap",
        80,
        "a GPU node has no monitor: no series and no names for its pods",
        "monitor.nodeSelector and tolerations must match that node; ask the monitor of the pod's own node",
    ),
    _row(
        "gpu_unlabelled",
        81,
        "a node with GPUs lacks the label that the monitor looks for",
        "kubectl label node {node} nvidia.com/gpu.present=true, or change monitor.nodeSelector",
    ),
    _row(
        "tenant_pod_security",
        82,
        "Pod Security refuses sharing pods in a tenant's namespace",
        "label it pod-security.kubernetes.io/enforce=privileged; docs/security.md, Pod Security levels",
    ),
    _row(
        "pods_unlimited",
        83,
        "sharing pods run without a quota",
        "recreate them: they are older than the webhook, or it was away; see kai-resource-isolator.io/status",
    ),
    _row(
        "pods_no_library",
        84,
        "pods wait for the library",
        "libsync has not installed {node}: kubectl get pods -A -l app.kubernetes.io/component=kai-libsync",
    ),
    _row(
        "pods_no_limit",
        85,
        "pods wait for a limit that KAI did not write",
        "correct label nvidia.com/gpu.memory (MiB) or the fraction, and recreate the pod; held on purpose",
    ),
    _row(
        "pods_no_configmap",
        86,
        "pods wait for KAI's ConfigMap",
        "KAI's binder took it back or never wrote it: read its log, and " + _RECREATE,
    ),
    _row(
        "pods_no_memory",
        87,
        "pods wait for GPU memory",
        "is label nvidia.com/gpu.memory right? then restart kai-scheduler; else the cards are full",
    ),
    _row("pods_waiting", 88, "sharing pods are not placed", "kubectl describe pod -n {namespace} {pod}"),
    _row(
        "cuda_refused",
        89,
        "CUDA is refused in a container",
        "its standard error names the cause; in most cases KAI gave no limit (hamicore)",
    ),
    _row(
        "preload_ignored",
        90,
        "the loader of a container does not take the library",
        "use a 64-bit glibc image of the node's architecture, and mount nothing over the library",
    ),
    _row(
        "limit_raised",
        91,
        "KAI's ConfigMap grants more than the pod asks for",
        "recreate the pod, and see who may edit ConfigMaps in its namespace",
    ),
    _row(
        "driver_insufficient",
        92,
        "the image needs a newer driver than its node has",
        "use an image of an older CUDA (the lab: 12.4.1), or upgrade the driver of node {node}",
    ),
    _row(
        "webhook_ignored",
        93,
        "while the webhook is away, sharing pods start without a quota",
        "webhook.failurePolicy=Fail, or webhook.admissionPolicy.enabled=true",
        notice=True,
    ),
    _row(
        "certificate_due",
        94,
        "the webhook's certificate ends soon",
        "built-in certificates renew themselves; renew yours, or see why cert-manager did not",
        notice=True,
    ),
    _row(
        "drain_blocked",
        95,
        "no replica of the webhook may be moved: a node cannot be drained",
        "webhook.podDisruptionBudget must leave one replica that may go",
        notice=True,
    ),
    _row(
        "versions_differ",
        96,
        "parts of different releases run",
        "wait for the upgrade to end, or install again with one image.tag",
        notice=True,
    ),
    _row(
        "opted_out",
        97,
        "sharing pods opted out of their quota",
        "webhook.podOptOut=false takes pods that choice; see who may label the namespace",
        notice=True,
    ),
    _row(
        "kai_absent",
        98,
        "KAI Scheduler is not here: nothing is shared yet",
        "install KAI 0.16.4 or later with its hamicore mode",
        notice=True,
    ),
    _row(
        "kubectl_skew",
        99,
        "kubectl is too far from the API server: exec can end with a WebSocket EOF",
        "use a kubectl within one minor version; kubectl logs works all the same",
        notice=True,
    ),
)
