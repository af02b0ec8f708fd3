"""The metric table: joined with pods, read off a view, and written down."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest
from isolator._core import lib
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from region_files import MIB, UID, RegionFile, Slot, Spec, folder, pod, uuid

from isolator.monitor import discovery, metrics, view
from isolator.monitor.collector import MonitorCollector
from isolator.monitor.model import NvmlDevice, NvmlView, PodView, Skip, Snapshot, State, Uncapped, Verdict

DOCS = Path(__file__).resolve().parents[2] / "docs" / "metrics.md"
OTHER = "22222222-1111-2222-3333-444455556666"
NOW = 1_800_000_000.0
MAIN = {"namespace": "team", "pod": f"pod-{UID[:8]}", "container": "main"}
CONST = {"zone": "vGPU"}

Series = dict[tuple[str, frozenset[tuple[str, str]]], float]


def _text(snapshot: Snapshot, legacy: bool = False) -> str:
    registry = CollectorRegistry()
    registry.register(MonitorCollector(lambda: snapshot, legacy=legacy))
    return generate_latest(registry).decode()


def _series(snapshot: Snapshot, legacy: bool = False) -> Series:
    found: Series = {}
    for family in text_string_to_metric_families(_text(snapshot, legacy)):
        for sample in family.samples:
            key = (sample.name, frozenset(sample.labels.items()))
            assert key not in found, f"{key} is there twice"
            found[key] = sample.value
    return found


def _get(series: Series, name: str, **labels: str) -> float | None:
    return series.get((name, frozenset(labels.items())))


def _names(series: Series) -> Counter[str]:
    return Counter(name for name, _ in series)


def _snap(mount: Path, *pods: PodView, **more: object) -> Snapshot:
    scan = discovery.scan(mount)
    known = {found.uid: found for found in pods}
    return Snapshot("n1", NOW, 0.25, scan.caches, known, True, skipped=scan.skipped, **more)  # type: ignore[arg-type]


def _nvml(up: bool = True) -> NvmlView:
    card = NvmlDevice(0, uuid(), "Tesla T4", 15360 * MIB, 5000 * MIB, 71.0, 12.0, 44.0, 31.5)
    bare = NvmlDevice(1, uuid(1), "Tesla T4")
    return NvmlView(up, NOW, (card, bare))


def _full(mount: Path) -> Snapshot:
    """A snapshot in which every row of the table has a point."""
    verdict = Verdict(
        **{k: MAIN[k] for k in MAIN}, state=State.UNCAPPED, uncapped=Uncapped.NO_LIMIT, expected_limit=7,
        mismatch=True, nvml_bytes={uuid(): 9}, bypass=True,
    )  # fmt: skip
    libsync = {
        "library_version": "1.2.0",
        "library_sha256": "ab",
        "ready": True,
        "verified_at": 5,
        "oversized_caches": 0,
    }
    uids = (UID, OTHER)
    return _snap(mount, *map(pod, uids), nvml=_nvml(), verdicts=(verdict,), libsync=libsync)


@pytest.fixture
def files(tmp_path: Path):  # type: ignore[no-untyped-def]
    """One container with our file, one with HAMi's."""
    ours = Spec(refused=3, refused_ns=int((NOW - 60) * 1e9), flags=lib.VGPU_FLAG_TAMPERED)
    theirs = Spec(
        ours=False, slots=[Slot(sm_util=40, module=MIB)], last_kernel=int(NOW) - 30, limit=8192 * MIB
    )
    with (
        RegionFile(folder(tmp_path) / "usage.cache", ours),
        RegionFile(folder(tmp_path, OTHER) / "0a1b.cache", theirs),
    ):
        yield tmp_path


def test_the_lab_s_figures_appear_exactly(tmp_path: Path) -> None:
    """Limit 4147m and 3 GiB on a T4 read 4.348444672e+09 and 3.328180224e+09, as the public lab shows."""
    spec = Spec(slots=[Slot(context=106_954_752, data=3 << 30)])
    with RegionFile(folder(tmp_path) / "usage.cache", spec):
        text = _text(_snap(tmp_path, pod()))
    labels = f'container="main",device_uuid="{uuid()}",namespace="team",pod="{MAIN["pod"]}",'
    labels += 'vdevice_index="0",zone="vGPU"'
    assert f"hami_vgpu_memory_limit_bytes{{{labels}}} 4.348444672e+09\n" in text
    assert f"hami_vgpu_memory_used_bytes{{{labels}}} 3.328180224e+09\n" in text


def test_a_container_s_series(files: Path) -> None:
    """Each figure stands under its name and labels; what a library does not measure is absent."""
    series = _series(_full(files))
    ours = {**MAIN, "vdevice_index": "0", "device_uuid": uuid()}
    theirs = {**ours, "pod": f"pod-{OTHER[:8]}"}
    assert _get(series, "hami_vgpu_memory_buffer_bytes", **ours, **CONST) == 1024 * MIB
    assert _get(series, "hami_vgpu_memory_context_bytes", **ours, **CONST) == 102 * MIB
    assert _get(series, "hami_vgpu_memory_module_bytes", **theirs, **CONST) == MIB
    assert _get(series, "hami_container_device_memory_bytes", **theirs, **CONST) == 1127 * MIB
    assert _get(series, "hami_container_device_utilization_ratio", **theirs, **CONST) == 40
    assert _get(series, "hami_container_device_utilization_ratio", **ours, **CONST) is None
    assert _get(series, "hami_container_last_kernel_elapsed_seconds", **theirs, **CONST) == 30
    assert _get(series, "hami_container_last_kernel_elapsed_seconds", **ours, **CONST) is None
    assert _get(series, "kai_isolator_refusals_total", **ours) == 3
    assert _get(series, "kai_isolator_refusals_total", **theirs) is None
    assert _get(series, "kai_isolator_last_refusal_timestamp_seconds", **ours) == NOW - 60
    assert _get(series, "kai_isolator_region_tampered", **MAIN) == 1
    assert _get(series, "kai_isolator_sm_limit_unenforced", **MAIN) == 0


def test_several_pods_on_one_card_are_told_apart(files: Path) -> None:
    """B168: each pod has its own series, and the card's ledger is their sum."""
    series = _series(_full(files))
    assert _names(series)["hami_vgpu_memory_used_bytes"] == 2
    assert _get(series, "kai_isolator_device_ledger_bytes", device_uuid=uuid()) == (1126 + 1127) * MIB
    assert _get(series, "kai_isolator_device_ledger_bytes", device_uuid=uuid(1)) == 0
    host = {
        "node": "n1",
        "device_index": "0",
        "device_uuid": uuid(),
        "device_type": "NVIDIA-Tesla T4",
        **CONST,
    }
    assert _get(series, "hami_gpu_shared_count", **host) is None
    assert _get(_series(_full(files), legacy=True), "hami_gpu_shared_count", **host) == 2
    assert _get(series, "hami_gpu_memory_allocated_bytes", **host) == (4147 + 8192) * MIB
    assert _get(series, "hami_host_gpu_memory_used_bytes", **host) == 5000 * MIB
    assert _names(series)["hami_host_gpu_memory_used_bytes"] == 1


@pytest.mark.parametrize(
    "change", [{"listed": False}, {"failed": frozenset({"pods"})}, {"failed": frozenset({"caches"})}]
)
def test_sums_over_unknown_containers_are_absent(tmp_path: Path, change: dict[str, object]) -> None:
    """Before the pods are listed, or where the caches cannot be scanned, sums are not 0 but unknown."""
    sums = ("kai_isolator_device_ledger_bytes", "hami_gpu_memory_allocated_bytes", "hami_gpu_shared_count")
    known, unknown = (
        _names(_series(_snap(tmp_path, nvml=_nvml(), **more), legacy=True)) for more in ({}, change)
    )
    assert [known[name] for name in sums] == [2, 2, 2]
    assert [unknown[name] for name in sums] == [0, 0, 0]
    assert unknown["kai_isolator_device_used_bytes"] == 1


def test_only_running_containers_of_live_pods_have_series(tmp_path: Path) -> None:
    """B162: ended, deleted and waiting ones have none; one whose process is seen alive does."""
    ended, waiting, gone = (f"{i}{UID[1:]}" for i in "abc")
    for uid in (ended, waiting, gone):
        RegionFile(folder(tmp_path, uid) / "usage.cache").close()
    RegionFile(folder(tmp_path, UID, "init") / "usage.cache").close()
    with RegionFile(folder(tmp_path) / "usage.cache"):
        pods = pod(ended, live=False), pod(waiting, running=False), pod(UID, "main", "init", running=False)
        series = _series(_snap(tmp_path, *pods))
    used = [dict(labels)["container"] for name, labels in series if name == "hami_vgpu_memory_used_bytes"]
    assert used == ["main"]
    assert _get(series, "kai_isolator_skipped_files", reason="not_running") == 3
    assert _get(series, "kai_isolator_skipped_files", reason="no_pod") == 1


def test_init_containers_and_several_devices_have_series(tmp_path: Path) -> None:
    """Every container of a pod, and every device of a container, stands for itself."""
    with (
        RegionFile(folder(tmp_path, UID, "init") / "usage.cache", Spec(uuids=[uuid(0), uuid(1)])),
        RegionFile(folder(tmp_path) / "usage.cache"),
    ):
        series = _series(_snap(tmp_path, pod(UID, "init", "main")))
    found = {
        (labels["container"], labels["vdevice_index"], labels["device_uuid"])
        for labels in (dict(key) for name, key in series if name == "hami_vgpu_memory_used_bytes")
    }
    assert found == {("init", "0", uuid(0)), ("init", "1", uuid(1)), ("main", "0", uuid(0))}


@pytest.mark.parametrize(("alive", "ended"), [(UID, OTHER), (OTHER, UID)])
def test_a_pod_that_is_there_twice_is_shown_once(tmp_path: Path, alive: str, ended: str) -> None:
    """A StatefulSet's pod made again under its name gives no duplicate series: the live one counts."""
    RegionFile(folder(tmp_path, ended) / "usage.cache").close()
    with RegionFile(folder(tmp_path, alive) / "usage.cache", Spec(limit=MIB)):
        series = _series(_snap(tmp_path, pod(UID, name="web-0"), pod(OTHER, name="web-0")))
    assert [v for (name, _), v in series.items() if name == "hami_vgpu_memory_limit_bytes"] == [MIB]


def test_an_impossible_figure_has_no_series(tmp_path: Path) -> None:
    """An underflow is counted; the container's other figures are there."""
    spec = Spec(
        slots=[Slot(data=(1 << 64) - 4096, total=(1 << 64) - 4096)], refused_ns=int((NOW + 1e6) * 1e9)
    )
    with RegionFile(folder(tmp_path) / "usage.cache", spec):
        names = _names(series := _series(_snap(tmp_path, pod()), legacy=True))
    assert names["hami_vgpu_memory_used_bytes"] == names["hami_vgpu_memory_buffer_bytes"] == 0
    assert names["vGPU_device_memory_usage_in_bytes"] == names["hami_container_device_memory_bytes"] == 0
    assert names["hami_vgpu_memory_limit_bytes"] == names["hami_vgpu_memory_context_bytes"] == 1
    assert names["kai_isolator_last_refusal_timestamp_seconds"] == 0
    assert _get(series, "kai_isolator_skipped_files", reason="implausible") == 1


def test_what_is_not_known_is_absent(tmp_path: Path) -> None:
    """B125: no NVML, no libsync, no pods yet: no zeros in their place."""
    names = _names(_series(Snapshot("n1", NOW)))
    assert names["kai_isolator_nvml_up"] == 1
    assert {
        n for n in names if n.startswith(("hami_", "kai_isolator_library", "kai_isolator_device"))
    } == set()
    assert names["kai_isolator_uncapped_containers"] == names["kai_isolator_oversized_caches"] == 0
    stale = _series(Snapshot("n1", NOW, nvml=_nvml(up=False), verdicts=(), libsync={"ready": "yes"}))
    assert (
        _names(stale)["hami_host_gpu_memory_used_bytes"] == _names(stale)["kai_isolator_library_ready"] == 0
    )
    assert {
        dict(key)["reason"]: v for (n, key), v in stale.items() if n == "kai_isolator_uncapped_containers"
    } == {reason.value: 0 for reason in Uncapped}


def test_every_row_has_the_labels_it_states(files: Path) -> None:
    """With all sources there no row is empty, and each series has exactly its row's labels."""
    shown = view.make(_full(files), {})
    for row in metrics.table(legacy=True):
        samples = row.family(shown).samples
        assert samples, f"{row.name} has no point in a full snapshot"
        assert {frozenset(sample.labels) for sample in samples} == {row.label_names}, row.name


def test_names_and_kinds_keep_prometheus_rules() -> None:
    """Counters and only counters end in _total, names are unique, every row has a sentence of help."""
    rows = metrics.table(legacy=True)
    assert len({row.name for row in rows}) == len(rows)
    for row in metrics.table(legacy=False):
        assert re.fullmatch(r"(hami|kai_isolator)(_[a-z0-9]+)+", row.name)
        assert row.name.endswith("_total") == (row.kind == "counter")
        assert row.help.endswith(".")
        assert not re.search(r"_(gauge|counter|mib|ms|percent)$", row.name)
    assert set(metrics.table(legacy=True)) - set(metrics.table(legacy=False)) == {
        *metrics.LEGACY_ROWS,
        *metrics.SCHEDULER_ROWS,
    }


def test_the_documentation_and_the_table_agree() -> None:
    """docs/metrics.md has every series with its type and labels, every reason, and nothing else."""
    text = DOCS.read_text()
    written = {
        name: (kind, labels.strip("`"))
        for name, kind, labels in re.findall(r"^\| `(\w+)` \| (gauge|counter) \| (\S+) \|", text, re.M)
    }
    assert written == {r.name: (r.kind, ",".join(r.labels) or "-") for r in metrics.table(legacy=True)}
    reasons = re.findall(r"^\| `(\w+)` \| [^|]+ \|$", text, re.M)
    assert reasons == [skip.value for skip in Skip]
    for value in (*State, *Uncapped):
        assert f"`{value.value}`" in text
