"""One snapshot out of many sources, each of which may fail; and who goes round the library."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import monitor_pods as made
import pytest
from region_files import RegionFile, Slot, Spec

from isolator.monitor import discovery, pods
from isolator.monitor.background import Background
from isolator.monitor.model import NvmlDevice, NvmlProcess, NvmlView, Snapshot, State, Uncapped, Verdict
from isolator.monitor.snapshot import Composer


class Pods:
    """A pod source with what it is given."""

    def __init__(self, *found: dict[str, Any], mount: str = made.MOUNT) -> None:
        self.listed, self.up, self.label = True, True, "15360"
        self.found = {pod["metadata"]["uid"]: pods.view(pod, mount) for pod in found}
        self.refreshed = 0

    def refresh_node(self) -> None:
        self.refreshed += 1

    def view_of(self, uid: str) -> Any:
        return self.found[uid]

    def pods(self) -> dict[str, Any]:
        return self.found


class Gpu:
    """An NVML source with processes on one card."""

    def __init__(self, *processes: NvmlProcess, up: bool = True) -> None:
        self.time = 1.0
        self.processes, self.up = processes, up

    def view(self) -> NvmlView:
        device = NvmlDevice(0, "GPU-0", "T4", processes=self.processes)
        return NvmlView(self.up, self.time, (device,))


def _process(proc: Path, pid: int, number: int) -> None:
    """A process of container `number` in a made-up process table."""
    (proc / str(pid)).mkdir(parents=True)
    (proc / str(pid) / "cgroup").write_text(f"0::/kubepods/pod{made.uid(number)}/{number:064x}\n")


def _compose(tmp_path: Path, found: Pods, gpu: Gpu | None = None, host_pid: bool = True) -> Composer:
    nvml = gpu or Gpu(up=False)
    return Composer("n", tmp_path, found, nvml, host_pid=host_pid, proc=tmp_path / "proc")


def test_uncapped_pod_without_cache_has_a_verdict(tmp_path: Path) -> None:
    """A fraction pod that nobody injected is told although it has no file at all."""
    snapshot = _compose(tmp_path, Pods(made.pod(1, injected=False))).snapshot()

    (verdict,) = snapshot.verdicts or ()
    assert (verdict.pod, verdict.state, verdict.uncapped) == ("pod-1", State.UNCAPPED, Uncapped.NOT_INJECTED)
    assert snapshot.node_gpu_memory_mib == 15360
    assert snapshot.failed == frozenset()


def test_a_mount_that_is_not_there_is_a_failed_source(tmp_path: Path) -> None:
    """Then `up` is 0; a mount without cache folders is scanned, and empty."""
    assert _compose(tmp_path / "nowhere", Pods()).snapshot().failed == {"caches"}
    assert _compose(tmp_path, Pods()).snapshot().failed == frozenset()


def test_nothing_is_concluded_before_pods_are_known(tmp_path: Path) -> None:
    """Without a first list there are no verdicts, which is not the same as none uncapped."""
    found = Pods()
    found.listed = False

    assert _compose(tmp_path, found).snapshot().verdicts is None


def test_finished_pods_have_no_verdict(tmp_path: Path) -> None:
    """Succeeded and Failed pods are nobody's to cap (B162)."""
    ended = [made.pod(number, phase=phase) for number, phase in enumerate(("Succeeded", "Failed"))]

    assert _compose(tmp_path, Pods(*ended)).snapshot().verdicts == ()


def test_installers_report_is_read(tmp_path: Path) -> None:
    """The report is there as it is; no report yet is no failure."""
    composer = _compose(tmp_path, Pods())
    assert composer.snapshot().libsync is None

    (tmp_path / "libsync.json").write_text(json.dumps({"schema": 1, "ready": True}))
    assert composer.snapshot().libsync == {"schema": 1, "ready": True}


@pytest.mark.parametrize("text", ["", "{", "[]", "\0" * 100, '{"a": 1}' + " " * 70000 + "x"])
def test_broken_report_fails_alone(tmp_path: Path, text: str) -> None:
    """A half-written or odd report is named as failed; pods are judged all the same."""
    (tmp_path / "libsync.json").write_text(text)
    snapshot = _compose(tmp_path, Pods(made.pod(1))).snapshot()

    if text.startswith('{"a"'):  # what lies past the bound is not read
        assert snapshot.libsync == {"a": 1}
        return
    assert snapshot.failed == {"libsync"}
    assert len(snapshot.verdicts or ()) == 1


def test_each_source_fails_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Caches that cannot be read, and NVML that raises, leave the rest (B164)."""

    def refuse(_: object) -> None:
        raise PermissionError("no")

    gpu = Gpu()
    monkeypatch.setattr(gpu, "view", lambda: 1 / 0)
    assert _compose(tmp_path, Pods(made.pod(1)), gpu).snapshot().failed == {"nvml"}

    monkeypatch.setattr(discovery.Scanner, "scan", refuse)
    snapshot = _compose(tmp_path, Pods(made.pod(1))).snapshot()
    assert snapshot.failed == {"caches"}
    assert (snapshot.verdicts, snapshot.skipped) == (None, Counter())
    assert len(snapshot.pods) == 1


def _verdict(snapshot: Snapshot) -> Verdict:
    (verdict,) = snapshot.verdicts or ()
    return verdict


def test_process_without_a_region_goes_round_the_library(tmp_path: Path) -> None:
    """An injected container on the GPU without a region is told once two answers of NVML agree."""
    _process(tmp_path / "proc", 40, 1)
    gpu = Gpu(NvmlProcess(40, 700), NvmlProcess(41, 900))
    composer = _compose(tmp_path, Pods(made.pod(1)), gpu)
    for _ in range(2):
        first = _verdict(composer.snapshot())
        assert (first.state, first.bypass, first.nvml_bytes) == (State.IDLE, False, {"GPU-0": 700})

    gpu.time = 2.0
    second = _verdict(composer.snapshot())
    assert (second.state, second.uncapped, second.bypass) == (State.UNCAPPED, Uncapped.BYPASS, True)

    gpu.time, gpu.processes = 3.0, ()
    assert _verdict(composer.snapshot()).bypass is False


def test_process_that_was_only_starting_is_not_told(tmp_path: Path) -> None:
    """A process that NVML lists a moment before its region is seen is no by-pass."""
    _process(tmp_path / "proc", 40, 1)
    gpu = Gpu(NvmlProcess(40, 700))
    composer = _compose(tmp_path, Pods(made.pod(1)), gpu)
    composer.snapshot()
    gpu.time = 2.0
    with RegionFile(tmp_path / "containers" / f"{made.uid(1)}_main" / "usage.cache"):
        verdict = _verdict(composer.snapshot())

    assert (verdict.state, verdict.bypass) == (State.ENFORCED, False)


def test_one_process_too_many_is_told_beside_capped_ones(tmp_path: Path) -> None:
    """A container with one capped process and one that the library does not hold is not fully capped."""
    for pid in (40, 41):
        _process(tmp_path / "proc", pid, 1)
    gpu = Gpu(NvmlProcess(40, 700), NvmlProcess(41, None))
    composer = _compose(tmp_path, Pods(made.pod(1)), gpu)
    spec = Spec(slots=[Slot()])
    with RegionFile(tmp_path / "containers" / f"{made.uid(1)}_main" / "usage.cache", spec):
        composer.snapshot()
        gpu.time = 2.0
        verdict = _verdict(composer.snapshot())

    assert (verdict.uncapped, verdict.bypass) == (Uncapped.BYPASS, True)


def test_without_host_pids_nothing_is_claimed(tmp_path: Path) -> None:
    """Off by default: neither bytes nor by-pass of a container are known, and no process is looked at."""
    _process(tmp_path / "proc", 40, 1)
    verdict = _verdict(
        _compose(tmp_path, Pods(made.pod(1)), Gpu(NvmlProcess(40, 7)), host_pid=False).snapshot()
    )

    assert (verdict.nvml_bytes, verdict.bypass) == (None, None)


class _Reporter:
    """Notes what it is asked to tell."""

    def __init__(self) -> None:
        self.told: list[Snapshot] = []

    def report(self, snapshot: Snapshot) -> int:
        self.told.append(snapshot)
        return 0


@pytest.mark.parametrize(
    ("label", "mismatch", "refreshed"),
    [(15360, False, 0), (15360, True, 1), (None, None, 1)],
)
def test_label_is_read_anew_before_a_mismatch_is_told(
    label: int | None, mismatch: bool | None, refreshed: int
) -> None:
    """The node's label may have changed since the last list; only then is anybody accused."""
    verdict = Verdict("t", "p", "c", State.ENFORCED, mismatch=mismatch)
    snapshot = Snapshot("n", 0, verdicts=(verdict,), node_gpu_memory_mib=label)
    node, reporter = Pods(), _Reporter()
    Background(lambda: snapshot, node, reporter).once()  # type: ignore[arg-type]

    assert node.refreshed == refreshed
    assert reporter.told == [snapshot]


@pytest.mark.parametrize(("now", "scans"), [("15360", 1), ("15000", 2), (str(15360 << 20), 1)])
def test_node_is_scanned_again_only_for_another_label(now: str, scans: int) -> None:
    """A label that came out the same, in bytes or not, changes no verdict: the snapshot is told as it is."""
    verdict = Verdict("t", "p", "c", State.ENFORCED, mismatch=True)
    made = [Snapshot("n", time, verdicts=(verdict,), node_gpu_memory_mib=15360) for time in range(2)]
    left, node, reporter = iter(made), Pods(), _Reporter()
    node.label = now
    Background(lambda: next(left), node, reporter).once()  # type: ignore[arg-type]

    assert reporter.told == [made[scans - 1]]


def test_unknown_pods_are_told_to_nobody() -> None:
    """Before the first list there is nothing to tell, and without a reporter nobody to tell it."""
    reporter = _Reporter()
    Background(lambda: Snapshot("n", 0), Pods(), reporter).once()  # type: ignore[arg-type]
    Background(lambda: Snapshot("n", 0, verdicts=()), Pods(), None).once()

    assert reporter.told == []
