"""The status document: what a scan of the node says, in the words of docs/status.md."""

from __future__ import annotations

import dataclasses
import json
import re
import time
import typing
from pathlib import Path

import monitor_pods
import pytest
import status_node as node
from isolator._core import lib
from region_files import MIB, Spec, uuid

from isolator.errors import ContractError
from isolator.monitor import document, status, view
from isolator.monitor.document import Document, Tenant
from isolator.monitor.model import Snapshot
from isolator.monitor.readings import SOURCES

DOCS = Path(__file__).resolve().parents[2] / "docs" / "status.md"


def made(snapshot: Snapshot) -> Document:
    return status.document(view.make(snapshot, {}))


def by_pod(shown: Document) -> dict[str | None, Tenant]:
    return {tenant.pod: tenant for tenant in shown.tenants}


def test_a_healthy_tenant_in_every_figure(tmp_path: Path) -> None:
    """Limit, use and peak are the region's words; nothing is called a problem."""
    with node.healthy(tmp_path) as snapshot:
        shown = made(snapshot)
    (tenant,) = shown.tenants
    (device,) = tenant.devices
    assert (tenant.title, tenant.uid) == ("team-a/train/main", monitor_pods.uid(1))
    assert (tenant.state, tenant.uncapped, tenant.reason, tenant.processes) == ("enforced", None, "", 1)
    assert (tenant.created, tenant.started) == (1_700_000_000.0, 1785578400.0)
    assert tenant.flags == document.Flags(False, False, None, False)
    assert tenant.expected_limit == 4147 * MIB
    assert (device.used, device.limit, device.peak) == (3174 * MIB, 4147 * MIB, 3300 * MIB)
    assert (device.refused, device.refused_last, device.refused_bytes, device.sm_limit) == (
        0,
        None,
        None,
        None,
    )
    assert (shown.node.problems, shown.node.skipped, shown.node.named) == ((), {}, True)
    assert (shown.node.nvml_up, shown.node.pod_watch_up) == (True, True)
    assert shown.node.memory_label == document.MemoryLabel("15360", 15360, False)
    assert (shown.node.library.version, shown.node.library.ready) == ("1.2.0", True)


def test_devices_have_nvml_s_figures_beside_the_ledger(tmp_path: Path) -> None:
    """Charged is the sum over the tenants of each card, allocated that of their limits."""
    with node.busy(tmp_path) as snapshot:
        first, second = made(snapshot).devices
    assert (first.index, first.uuid, first.name) == (0, uuid(0), "Tesla T4")
    assert (first.memory_used, first.memory_total) == (9800 * MIB, 15360 * MIB)
    assert first.charged == (4100 + 1500 + 900 + 700) * MIB
    assert first.allocated == (4 * 4147 + 8192) * MIB
    assert (second.charged, second.allocated) == (1500 * MIB, 4147 * MIB)
    assert (first.utilization, first.temperature, first.power) == (87.0, 66.0, 68.4)


def test_every_kind_of_tenant_says_what_holds(tmp_path: Path) -> None:
    """State, kind and flags are the verdict's, a tenant without any region included."""
    with node.busy(tmp_path) as snapshot:
        tenants = by_pod(made(snapshot))
    states = {name: (tenant.state, tenant.uncapped) for name, tenant in tenants.items()}
    assert states == {
        "llm-serving-7d9f8b6c5d-x2x4q": ("enforced", None),
        "train-0": ("enforced", None),
        "notebook": ("refused", None),
        "batch": ("enforced", None),
        "old-library": ("enforced", None),
        "waiting": ("idle", None),
        "stray": ("uncapped", "not_injected"),
    }
    assert (tenants["batch"].flags.mismatch, tenants["batch"].flags.tampered) == (True, True)
    assert (tenants["waiting"].devices, tenants["waiting"].processes) == ((), None)
    assert tenants["stray"].reason == "the webhook did not see the pod"
    assert [device.index for device in tenants["train-0"].devices] == [0, 1]
    (full,) = tenants["llm-serving-7d9f8b6c5d-x2x4q"].devices
    assert (full.refused, full.refused_bytes) == (17, 2048 * MIB)
    assert full.refused_last is not None and 41 < time.time() - full.refused_last < 60


def test_what_hami_core_does_not_count_is_not_zero(tmp_path: Path) -> None:
    """Refusals, peak and flags of a foreign region are not known."""
    with node.busy(tmp_path) as snapshot:
        tenant = by_pod(made(snapshot))["old-library"]
    (device,) = tenant.devices
    assert (device.used, device.peak, device.refused, device.refused_bytes) == (700 * MIB, None, None, None)
    assert (tenant.flags.tampered, tenant.flags.sm_unenforced) == (None, None)


def test_an_impossible_word_and_a_time_to_come_are_not_known(tmp_path: Path) -> None:
    """What a tenant damaged in its file is null, not a figure."""
    future = int((time.time() + 10 * 86400) * 1e9)
    spec = Spec(slots=[node.slot(500)], limit=1 << 60, refused=2, refused_ns=future, sm_limit=30)
    with node.put(tmp_path, 1, spec):
        (tenant,) = made(node.compose(tmp_path, node.Pods(node.pod(1)))).tenants
    (device,) = tenant.devices
    assert (device.limit, device.refused, device.refused_last, device.sm_limit) == (None, 2, None, 30)


def test_without_nvml_the_devices_are_the_tenants(tmp_path: Path) -> None:
    """Last known figures of the driver would pass for today's: they are null, the ledger stays."""
    report = node.Cards(*node.CARDS, up=False)
    with node.put(tmp_path, 1, Spec(slots=[node.slot(500)])):
        shown = made(node.compose(tmp_path, node.Pods(node.pod(1)), report))
    assert [device.uuid for device in shown.devices] == [uuid(0)]
    assert shown.devices[0] == document.Device(None, uuid(0), charged=500 * MIB, allocated=4147 * MIB)
    assert "NVML does not answer: the devices' own figures are missing" in shown.node.problems


def test_before_the_pods_are_known_tenants_go_by_uid(tmp_path: Path) -> None:
    """The cache folders are shown, nothing is summed up as if they all ran, and it is said."""
    pods = node.Pods()
    pods.listed = False
    with node.put(tmp_path, 1, Spec(slots=[node.slot(500)])):
        shown = made(node.compose(tmp_path, pods))
    (tenant,) = shown.tenants
    assert (tenant.namespace, tenant.pod, tenant.title) == (None, None, f"{monitor_pods.uid(1)}/main")
    assert (shown.node.named, shown.node.skipped) == (False, {})
    assert (shown.devices[0].charged, shown.devices[0].allocated) == (500 * MIB, None)
    assert "tenants are shown by pod UID" in shown.node.problems[0]


def test_caches_that_cannot_be_read_are_no_empty_node(tmp_path: Path) -> None:
    """No tenant is seen: nothing is charged as far as is known, which is not 0."""
    shown = made(node.compose(tmp_path / "absent", node.Pods(node.pod(1))))
    assert shown.tenants == ()
    assert [device.charged for device in shown.devices] == [None, None]
    assert "cache folders cannot be read" in shown.node.problems[0]


def test_a_broken_scan_is_a_document() -> None:
    """Nothing is known, and it says so."""
    shown = status.document(view.View(Snapshot("", 5.0), up=False))
    assert (shown.tenants, shown.devices, shown.node.named) == ((), (), False)
    assert shown.node.problems == ("the scan of this node failed: the monitor's log says why",)


@pytest.mark.parametrize(
    ("told", "said"),
    [
        ({"ready": False, "problem": "the mount is noexec"}, "not ready on this node: the mount is noexec"),
        ({"ready": "yes"}, "not ready on this node: libsync names no cause"),
        ({"verified_at": -3600}, "has not looked at the library for 60 minutes"),
    ],
)
def test_library_s_trouble_is_a_problem(tmp_path: Path, told: dict[str, object], said: str) -> None:
    """What libsync reports, or no longer reports, of the node; a negative time is so long ago."""
    if isinstance(told.get("verified_at"), int):
        told = {"verified_at": time.time() + told["verified_at"]}
    node.report(tmp_path, **told)
    (problem,) = made(node.compose(tmp_path, node.Pods())).node.problems
    assert said in problem


@pytest.mark.parametrize(
    ("label", "said"),
    [(None, "no label"), ("many", "is no number: many"), ("16106127360", "is in bytes (16106127360)")],
)
def test_label_s_trouble_is_a_problem(tmp_path: Path, label: str | None, said: str) -> None:
    """KAI #1967: a label that is missing, no number, or in bytes."""
    node.report(tmp_path)
    shown = made(node.compose(tmp_path, node.Pods(label=label))).node
    (problem,) = shown.problems
    assert said in problem
    assert shown.memory_label.text == label
    assert shown.memory_label.in_bytes is (None if label is None else label == "16106127360")


def test_tenants_trouble_is_counted_by_kind(tmp_path: Path) -> None:
    """One line a kind, the gravest first, which names three at most."""
    node.report(tmp_path)
    stray = [node.pod(n, injected=False, annotations={"gpu-memory": "4096"}) for n in range(1, 6)]
    with node.put(tmp_path, 9, Spec(flags=lib.VGPU_FLAG_TAMPERED)):
        problems = made(node.compose(tmp_path, node.Pods(*stray, node.pod(9)))).node.problems
    names = ", ".join(f"team-a/pod-{n}/main" for n in (1, 2, 3))
    assert problems == (
        f"5 containers without a limit: {names} and 2 more",
        "1 container with an altered limit or quota word: team-a/pod-9/main",
    )


def test_foreign_text_is_one_printable_line(tmp_path: Path) -> None:
    """Escape codes, line feeds and lone surrogates of an annotation or a report do not get through."""
    evil = "\x1b[2J\n\ud800<script>"
    node.report(tmp_path, ready=False, problem=evil)
    pod = node.pod(
        1,
        injected=False,
        annotations={"gpu-memory": "1", "kai-resource-isolator.io/status": f"skipped: {evil}"},
    )
    shown = made(node.compose(tmp_path, node.Pods(pod, label="1\x1b")))
    text = document.dump(shown).decode()
    assert "script" in text and not re.search(r"\\u001b|\\n|\x1b|\ud800", text)
    assert document.load(text.encode()) == shown


@pytest.mark.parametrize("source", sorted(set(SOURCES) - {"snapshot"}))
def test_a_failed_source_is_a_problem(tmp_path: Path, source: str) -> None:
    """Whatever cannot be read is told."""
    with node.healthy(tmp_path) as snapshot:
        failed = dataclasses.replace(
            snapshot, failed=frozenset({source}), nvml=None if source == "nvml" else snapshot.nvml
        )
        assert len(made(failed).node.problems) == 1


def test_json_comes_back_and_bad_json_is_one_line(tmp_path: Path) -> None:
    """A reader gets the same document, takes later fields, and refuses what it cannot understand."""
    with node.busy(tmp_path) as snapshot:
        shown = made(snapshot)
    text = document.dump(shown)
    assert document.load(text) == shown
    later = json.loads(text) | {"news": 1}
    assert document.load(json.dumps(later).encode()) == shown
    for bad in (b"", b"[]", b'{"schema": 1}', json.dumps(later | {"schema": 2}).encode()):
        with pytest.raises(ContractError, match=r"^[^\n]+$"):
            document.load(bad)


def test_tenants_of_an_empty_node_are_an_empty_list(tmp_path: Path) -> None:
    """Not null: a program may go through them."""
    node.report(tmp_path)
    told = json.loads(document.dump(made(node.compose(tmp_path, node.Pods()))))
    assert (told["schema"], told["tenants"], told["node"]["problems"]) == (1, [], [])


def _fields(kind: type, prefix: str = "") -> list[str]:
    found: list[str] = []
    hints = typing.get_type_hints(kind)
    for field in dataclasses.fields(kind):
        hint, args = hints[field.name], typing.get_args(hints[field.name])
        if dataclasses.is_dataclass(hint):
            found += _fields(typing.cast(type, hint), f"{prefix}{field.name}.")
        elif args and dataclasses.is_dataclass(args[0]):
            found += _fields(args[0], f"{prefix}{field.name}[].")
        else:
            found.append(prefix + field.name)
    return found


def test_each_field_is_documented() -> None:
    """docs/status.md has each field of the document, and no other."""
    table = DOCS.read_text().split("| field | meaning |")[1]
    assert sorted(re.findall(r"^\| `([\w.\[\]]+)` \|", table, re.M)) == sorted(_fields(Document))
