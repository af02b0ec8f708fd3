"""What HAMi's scheduler would export, as far as regions and NVML tell it."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from region_files import MIB, UID, RegionFile, Spec, folder, pod, uuid

from isolator.monitor import discovery, metrics, view
from isolator.monitor.model import Container, NvmlDevice, NvmlView, PodView, Snapshot

OTHER = "22222222-1111-2222-3333-444455556666"
TOTAL = 16384 * MIB
HOST = "hami_node_gpu_memory_allocated_ratio hami_gpu_core_allocated_ratio nodeGPUMemoryPercentage"


def _read(snapshot: Snapshot, name: str) -> list[tuple[dict[str, str], float]]:
    (row,) = (row for row in metrics.table(legacy=True) if row.name == name)
    return [(s.labels, s.value) for s in row.family(view.make(snapshot, {})).samples]


def _pods() -> list[PodView]:
    """One pod with `main` behind a sidecar and an init container, one with `main` alone."""
    first = pod(UID, "sidecar", "main")
    init = Container("team", first.name, UID, "main-init", init=True)
    return [dataclasses.replace(first, containers=(init, *first.containers)), pod(OTHER)]


def _snapshot(mount: Path, memory: int | None = TOTAL, **more: object) -> Snapshot:
    scan = discovery.scan(mount)
    known = {found.uid: found for found in _pods()}
    card = NvmlDevice(0, uuid(), "Tesla T4", memory)
    nvml = NvmlView(True, 1.0, (card,))
    return Snapshot("n1", 1.0, 0.1, scan.caches, known, True, nvml=nvml, **more)  # type: ignore[arg-type]


@pytest.fixture
def mount(tmp_path: Path):  # type: ignore[no-untyped-def]
    """A quarter of the card with 30 % of its SMs, and half of it without a word of SMs."""
    with (
        RegionFile(folder(tmp_path) / "usage.cache", Spec(limit=TOTAL // 4, sm_limit=30)),
        RegionFile(folder(tmp_path, OTHER) / "usage.cache", Spec(limit=TOTAL // 2, sm_limit=100)),
    ):
        yield tmp_path


def test_a_device_says_what_is_given_out_of_it(mount: Path) -> None:
    """Limits and SM limits are summed; a limit of all SMs is none."""
    for name, value in {
        "GPUDeviceMemoryLimit": TOTAL,
        "GPUDeviceMemoryAllocated": TOTAL * 3 // 4,
        "nodeGPUOverview": TOTAL * 3 // 4,
        "nodeGPUMemoryPercentage": 0.75,
        "hami_node_gpu_memory_allocated_ratio": 0.75,
        "GPUDeviceSharedNum": 2,
        "GPUDeviceCoreLimit": 100,
        "GPUDeviceCoreAllocated": 30,
        "hami_gpu_core_allocated_ratio": 30,
    }.items():
        ((labels, found),) = _read(_snapshot(mount), name)
        assert found == value, name
        assert labels.get("deviceuuid", labels.get("device_uuid")) == uuid()


def test_a_container_is_named_by_its_place(mount: Path) -> None:
    """Its index counts the containers of its kind alone, and its share is of the device's memory."""
    snapshot = _snapshot(mount)
    for name, first, second in (
        ("hami_vgpu_memory_allocated_bytes", TOTAL // 4, TOTAL // 2),
        ("vGPUPodsDeviceAllocated", TOTAL // 4, TOTAL // 2),
        ("vGPUMemoryPercentage", 0.25, 0.5),
        ("vGPUCorePercentage", 0.3, 0.0),
        ("vGPUCoreAllocated", 30, 0),
    ):
        whose = ("pod", "container_index") if name.startswith("hami_") else ("podname", "containeridx")
        found = {tuple(labels[key] for key in whose): value for labels, value in _read(snapshot, name)}
        assert found == {(f"pod-{UID[:8]}", "1"): first, (f"pod-{OTHER[:8]}", "0"): second}, name


def test_what_the_driver_does_not_say_is_absent(mount: Path) -> None:
    """Without the device's memory there is no share of it; without the pods no sum over them."""
    unknown = _snapshot(mount, memory=None)
    assert _read(unknown, "vGPUMemoryPercentage") == _read(unknown, "nodeGPUMemoryPercentage") == []
    assert len(_read(unknown, "vGPUMemoryAllocated")) == 2
    for name in HOST.split():
        assert _read(_snapshot(mount, listed=False), name) == []


def test_no_limit_is_no_grant(tmp_path: Path) -> None:
    """A region without a limit grants nothing that could be shown."""
    with RegionFile(folder(tmp_path) / "usage.cache", Spec(limit=0)):
        found = _snapshot(tmp_path)
    assert _read(found, "vGPUMemoryAllocated") == _read(found, "vGPUMemoryPercentage") == []
    assert [value for _, value in _read(found, "hami_vgpu_core_allocated_ratio")] == [0]
