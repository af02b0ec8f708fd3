"""The double of KAI Scheduler computes what the contract's tables state."""

from __future__ import annotations

import copy
import random
import sys
from pathlib import Path
from typing import Any

import pytest

from isolator import names

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "cluster"))

import kai_grant as grant
import kai_place as place
import kai_rules as rules

MODE = rules.Mode()
OPEN = rules.Mode(version=(0, 17, 0))
PREFIX = "owner-abcdefg-shared-gpu"


def pod(given: dict[str, str], **spec: Any) -> rules.Pod:
    """A pod of one container, unless `spec` says otherwise."""
    return {
        "metadata": {"name": "a", "annotations": given},
        "spec": {"containers": [{"name": "main", "image": "x"}], **spec},
    }


def asked(request: str) -> rules.Pod:
    """The pod of a row: `4096` MiB or a fraction like `0.25`."""
    key = names.ANNOTATION_FRACTION if "." in request else names.ANNOTATION_MEMORY
    return pod({key: request})


@pytest.mark.parametrize(
    ("wanted", "label", "usable", "portion", "limit", "tenants"),
    [
        ("4096", "15360", 15300, "0.27", "4147m", 3),
        ("4096", "16384", 16300, "0.26", "4259m", 3),
        ("4096", "23034", 23000, "0.18", "4146m", 5),
        ("4096", "81559", 81500, "0.06", "4893m", 16),
        ("4096", "143771", 143700, "0.03", "4313m", 33),
        ("2000", "11264", 11200, "0.18", "2027m", 5),
        ("2000", "143771", 143700, "0.02", "2875m", 50),
        ("20480", "40960", 40900, "0.51", "20889m", 1),
        ("0.25", "15360", 15300, "0.25", "3840m", 4),
        ("0.5", "81559", 81500, "0.50", "40779m", 2),
        ("0.333", "15360", 15300, "0.33", "5068m", 3),
        ("0.125", "143771", 143700, "0.12", "17252m", 8),
        ("1400", "20000", 20000, "0.08", "1600m", 12),
    ],
)
def test_rounding_table(wanted: str, label: str, usable: int, portion: str, limit: str, tenants: int) -> None:
    """Each row of the contract's table, floating-point trap included, gives its limit and tenants."""
    share = grant.portion(asked(wanted), label, MODE)
    assert grant.schedulable_mib(label) == usable
    assert grant.portion_text(share) == portion
    assert grant.limit(share, label, MODE) == limit
    assert int(1 / share + 1e-9) == tenants


def test_label_in_bytes_leaves_the_limit_unlimited() -> None:
    """The scheduler copes with a label in bytes; the limit is a share of the raw number, so there is none."""
    label = str(16384 << 20)
    share = grant.portion(asked("4096"), label, MODE)
    assert grant.portion_text(share) == "0.26"
    assert grant.limit(share, label, MODE) == f"{int((16384 << 20) * 0.26)}m"


@pytest.mark.parametrize("label", [None, "", "unknown", "-5", "0"])
def test_missing_label_skips_the_limit_or_fails_the_bind(label: str | None) -> None:
    """Up to 0.17.0 the key is left out in silence; later releases do not bind."""
    assert grant.schedulable_mib(label) == 100
    assert grant.portion(asked("4096"), label, MODE) > 1
    assert grant.limit(0.5, label, OPEN) is None
    with pytest.raises(grant.BindError, match="no limit"):
        grant.limit(0.5, label, rules.Mode(version=(0, 17, 1)))


def test_portion_that_shows_as_zero_is_treated_as_a_missing_label() -> None:
    """A fraction below 0.005 has the portion 0.00."""
    assert grant.limit(grant.portion(asked("0.004"), "15360", OPEN), "15360", OPEN) is None
    with pytest.raises(grant.BindError):
        grant.limit(0.004, "15360", MODE)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"gpu-fraction": "NaN"}, "gpu-fraction"),
        ({"gpu-fraction": ""}, "gpu-fraction"),
        ({"gpu-fraction": "1"}, "gpu-fraction"),
        ({"gpu-fraction": "0"}, "gpu-fraction"),
        ({"gpu-memory": "4Gi"}, "gpu-memory"),
        ({"gpu-memory": "0"}, "gpu-memory"),
        ({"gpu-memory": "-1"}, "gpu-memory"),
        ({"gpu-memory": "4096", "gpu-fraction-num-devices": "0"}, "num-devices"),
        ({"gpu-memory": "4096", "gpu-fraction-container-name": "nobody"}, "'nobody' not found"),
        ({"mps": "true"}, "mps"),
        (
            {"gpu-fraction-container-name": "main", "nvidia.com/container.b.gpu-memory.request": "5"},
            "several",
        ),
    ],
)
def test_bad_annotations_are_denied(given: dict[str, str], why: str) -> None:
    """The validation of section 1.4 names the annotation."""
    with pytest.raises(rules.Denied, match=why):
        rules.validate(pod(given), MODE)


def test_whole_gpu_beside_a_fraction_is_denied() -> None:
    """A fraction pod cannot have an nvidia.com/gpu limit."""
    bad = pod({"gpu-fraction": "0.5"})
    bad["spec"]["containers"][0]["resources"] = {"limits": {"nvidia.com/gpu": "1"}}
    with pytest.raises(rules.Denied, match="fraction pod cannot"):
        rules.validate(bad, MODE)


def test_init_containers_are_searched_first() -> None:
    """A name that both lists have means the init container, and its ConfigMap carries -i<index>."""
    both = [{"name": "other"}, {"name": "twin"}]
    found = pod(
        {"gpu-memory": "1", "gpu-fraction-container-name": "twin"}, initContainers=both, containers=both
    )
    assert rules.target(found, MODE) == (True, 1)
    assert rules.configmap_names(PREFIX, (True, 1)) == (f"{PREFIX}-i1", f"{PREFIX}-i1-evar")
    assert rules.configmap_names(PREFIX, (False, 0)) == (f"{PREFIX}-0", f"{PREFIX}-0-evar")


def test_configmap_name_is_a_valid_volume_name_of_any_owner() -> None:
    """A long owner's name with dots is cut so that the longest use has at most 63 characters."""
    long = pod({"gpu-memory": "1"})
    long["metadata"]["ownerReferences"] = [{"name": "job.with.dots-" + "x" * 80}]
    prefix = rules.configmap_prefix(long, random.Random(1))
    assert prefix.startswith("job-with-dots-") and prefix.endswith("-shared-gpu")
    assert len(f"{prefix}-i99-evar") <= 63 and "." not in prefix


def env(of: rules.Pod) -> dict[str, Any]:
    """Variables of the first container, in order."""
    return {entry["name"]: entry for entry in of["spec"]["containers"][0].get("env", [])}


def test_admission_adds_what_the_contract_lists() -> None:
    """Variables by configMapKeyRef, the limit alone optional; volume, envFrom, annotation; idempotent."""
    before = pod({"gpu-memory": "4096"}, runtimeClassName="mine")
    before["spec"]["containers"][0]["env"] = [
        {"name": names.ENV_MEMORY_LIMIT, "value": "80g"},
        {"name": "USER", "value": "x"},
    ]
    kept = copy.deepcopy(before)
    after = rules.mutate(before, rules.Mode(runtime_class="nvidia"), random.Random(7))
    assert before == kept
    prefix = after["metadata"]["annotations"][names.ANNOTATION_CONFIGMAP]
    assert list(env(after)) == [
        "USER",
        names.ENV_NVIDIA_VISIBLE_DEVICES,
        names.ENV_NUM_OF_GPUS,
        names.ENV_GPU_PORTION,
        names.ENV_MEMORY_LIMIT,
    ]
    limit = env(after)[names.ENV_MEMORY_LIMIT]["valueFrom"]["configMapKeyRef"]
    assert limit == {"name": f"{prefix}-0", "key": names.ENV_MEMORY_LIMIT, "optional": True}
    assert "optional" not in env(after)[names.ENV_GPU_PORTION]["valueFrom"]["configMapKeyRef"]
    assert after["spec"]["volumes"] == [{"name": f"{prefix}-0-vol", "configMap": {"name": f"{prefix}-0"}}]
    assert after["spec"]["containers"][0]["envFrom"][0]["configMapRef"]["name"] == f"{prefix}-0-evar"
    assert after["spec"]["runtimeClassName"] == "mine"
    assert rules.mutate(after, rules.Mode(runtime_class="nvidia")) == after


@pytest.mark.parametrize(
    ("mode", "absent"),
    [
        (rules.Mode(hamicore=False), names.ENV_MEMORY_LIMIT),
        (rules.Mode(nri=True), names.ENV_NVIDIA_VISIBLE_DEVICES),
        (rules.Mode(nvfractions=True), names.ENV_GPU_PORTION),
    ],
)
def test_modes_leave_their_variable_out(mode: rules.Mode, absent: str) -> None:
    """Without hamicore no limit, under NRI no visible devices, with NvFractions no ConfigMap at all."""
    after = rules.mutate(pod({"gpu-memory": "4096"}), mode)
    assert absent not in env(after)
    assert (names.ANNOTATION_CONFIGMAP in after["metadata"]["annotations"]) == (not mode.nvfractions)


def test_nvfractions_annotation_alone_counts_from_0_18() -> None:
    """The container named in the key is the target; an older release sees no fraction pod."""
    named = pod(
        {"nvidia.com/container.b.gpu-memory.request": "4096"}, containers=[{"name": "a"}, {"name": "b"}]
    )
    assert rules.is_fraction(named, MODE) and rules.target(named, MODE) == (False, 1)
    assert not rules.is_fraction(named, OPEN) and rules.mutate(named, OPEN) == named
    assert grant.portion_text(grant.portion(named, "15360", MODE)) == "0.27"


def test_binder_writes_the_values() -> None:
    """UUIDs, portion and limit in the capabilities map; the devices move to -evar without the reference."""
    admitted = rules.mutate(pod({"gpu-memory": "4096"}), MODE)
    (_, data), (_, evar) = grant.binding_data(admitted, ["GPU-1", "GPU-2"], 0.27, "15360", MODE)
    assert data == {
        names.ENV_GPU_PORTION: "0.27",
        names.ENV_NUM_OF_GPUS: "0.27",
        names.ENV_NVIDIA_VISIBLE_DEVICES: "GPU-1,GPU-2",
        names.ENV_MEMORY_LIMIT: "4147m",
    }
    assert evar == {}
    nri = rules.Mode(nri=True, cdi=True)
    (_, data), (_, evar) = grant.binding_data(
        rules.mutate(pod({"gpu-memory": "4096"}), nri), ["GPU-1"], 0.27, "15360", nri
    )
    assert evar == {names.ENV_NVIDIA_VISIBLE_DEVICES: "k8s.device-plugin.nvidia.com/gpu=GPU-1"}
    meta = grant.binding_metadata(asked("0.25"), ["g1", "g2"], ["GPU-1", "GPU-2"], "15360", nri)
    assert meta["annotations"]["nvidia.cdi.k8s.io/container.main"].count("GPU-") == 2
    assert meta["annotations"]["nvidia.com/container.main.gpu-memory.request"] == "3840Mi"
    assert meta["labels"] == {"runai-gpu-group": "g1", "runai-gpu-group/g1": "g1", "runai-gpu-group/g2": "g2"}


def node(name: str, **spec: Any) -> dict[str, Any]:
    """A Ready node of a T4."""
    return {
        "metadata": {"name": name, "labels": {"host": name, names.NODE_LABEL_GPU_MEMORY: "15360"}},
        "spec": spec,
        "status": {"conditions": [{"type": "Ready", "status": "True"}]},
    }


def test_pods_fill_one_card_before_the_next() -> None:
    """Three of 4096 MiB fit a T4; the fourth goes to the other card, a pod of two devices to none."""
    nodes, cards = [node("n1"), node("n2")], [place.Card("n1", "GPU-1"), place.Card("n2", "GPU-2")]
    seen = []
    for number in range(4):
        _, (card,), share = place.choose(asked("4096"), nodes, cards, MODE)
        card.shares[f"uid-{number}"] = share
        seen.append(card.uuid)
    assert len(set(seen[:3])) == 1 and seen[3] != seen[0]
    double = asked("4096")
    double["metadata"]["annotations"][names.ANNOTATION_DEVICES] = "2"
    with pytest.raises(grant.BindError, match="no node"):
        place.choose(double, nodes, cards, MODE)


def test_nodes_that_do_not_fit_are_left_out() -> None:
    """Selector, cordon, taints and a missing label: a pod that asks by MiB waits for a fitting node."""
    cards = [place.Card("n1", "GPU-1"), place.Card("n2", "GPU-2")]
    wanted = asked("4096")
    wanted["spec"]["nodeSelector"] = {"host": "n2"}
    assert place.choose(wanted, [node("n1"), node("n2")], cards, MODE)[0]["metadata"]["name"] == "n2"
    taint = {"key": "nvidia.com/gpu", "effect": "NoSchedule"}
    unlabelled = node("n2")
    del unlabelled["metadata"]["labels"][names.NODE_LABEL_GPU_MEMORY]
    for bad in (node("n2", unschedulable=True), node("n2", taints=[taint]), unlabelled):
        with pytest.raises(grant.BindError):
            place.choose(wanted, [node("n1"), bad], cards, MODE)
    wanted["spec"]["tolerations"] = [{"key": "nvidia.com/gpu", "operator": "Exists"}]
    assert place.choose(wanted, [node("n2", taints=[taint])], cards, MODE)[1] == [cards[1]]
