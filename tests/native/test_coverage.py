"""Each name the driver exports is classed: hooked, without device memory, or passed on by a stated rule.

The lists are tests/data/coverage_{cuda,nvml}.tsv: name, class, reason. A new driver's names make the first
test fail until somebody has thought about each of them.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "tests" / "data"
LIBRARIES = {
    "CUDA": ("coverage_cuda.tsv", "libcuda-580.159-symbols.txt", 682),
    "NVML": ("coverage_nvml.tsv", "libnvidia-ml-580.159-symbols.txt", 404),
}
CLASSES = {"hooked", "none", "passed"}

# What HAMi-core leaves without any hook although it takes memory, or launches what does.
UNHOOKED_BY_PEERS = """
cuDevicePrimaryCtxReset cuDevicePrimaryCtxReset_v2 cuGraphAddMemAllocNode cuGraphAddMemFreeNode
cuGraphAddNode cuGraphAddNode_v2 cuGraphExecUpdate cuGraphExecUpdate_v2 cuGraphInstantiateWithParams
cuGraphInstantiateWithParams_ptsz cuDeviceGraphMemTrim cuLaunch cuLaunchGrid cuLaunchGridAsync
cuLaunchCooperativeKernelMultiDevice cuLaunchKernel_ptsz cuLaunchKernelEx_ptsz
cuLaunchCooperativeKernel_ptsz cuMemAllocAsync_ptsz cuMemAllocFromPoolAsync_ptsz cuMemFreeAsync_ptsz
cuGraphLaunch_ptsz cuGraphUpload_ptsz cuLibraryLoadData cuLibraryLoadFromFile cuLibraryUnload
cuLibraryGetGlobal cuLibraryGetManaged cuGreenCtxCreate cuGreenCtxDestroy cuGreenCtxStreamCreate
cuCtxFromGreenCtx cuCtxAttach cuCtxDetach cuMemUnmap cuMemRetainAllocationHandle
cuMemExportToShareableHandle cuMemMapArrayAsync cuMemMapArrayAsync_ptsz cuMemSetAccess cuMulticastCreate
cuMulticastAddDevice cuMulticastBindMem cuMulticastBindAddr cuGraphicsMapResources
cuGraphicsGLRegisterBuffer cuGraphicsEGLRegisterImage cuCheckpointProcessCheckpoint
cuCheckpointProcessRestore cuMemSetMemPool cuMemPrefetchAsync cuMemPrefetchAsync_v2
cuMemPrefetchBatchAsync cuMemDiscardBatchAsync cuMemDiscardAndPrefetchBatchAsync cuArrayCreate
cuMemAllocFromPoolAsync cuMemPoolCreate cuMemPoolDestroy cuMemPoolTrimTo cuGraphLaunch cuGraphUpload
cuImportExternalMemory cuDestroyExternalMemory
""".split()

# What NVML says of used and free memory, and of who uses it.
REVEALING = [
    "nvmlDeviceGetMemoryInfo",
    "nvmlDeviceGetMemoryInfo_v2",
    "nvmlDeviceGetConfComputeProtectedMemoryUsage",
    "nvmlDeviceGetRunningProcessDetailList",
    "nvmlDeviceGetProcessUtilization",
    "nvmlDeviceGetProcessesUtilizationInfo",
    *(
        f"nvmlDeviceGet{kind}RunningProcesses{version}"
        for kind in ("Compute", "Graphics", "MPSCompute")
        for version in ("", "_v2", "_v3")
    ),
]


class Row:
    """One line of a coverage list."""

    def __init__(self, line: str) -> None:
        fields = line.split("\t")
        self.name, self.kind = fields[0], fields[1]
        self.reason = fields[2] if len(fields) > 2 else ""
        found = re.search(r"\[(\w+)\]$", self.reason)
        self.test = found.group(1) if found else None


def _rows(library: str) -> list[Row]:
    return [Row(line) for line in (DATA / LIBRARIES[library][0]).read_text().splitlines()]


def _names(library: str) -> list[str]:
    return (DATA / LIBRARIES[library][1]).read_text().split()


def _hooks(library: str) -> set[str]:
    table = (ROOT / "native" / "shim" / "hooks.def").read_text()
    return set(re.findall(rf"^HOOK\({library}, (\w+),", table, re.MULTILINE))


def _tests() -> set[str]:
    text = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    return set(re.findall(r"^def (test_\w+)\(", text, re.MULTILINE))


@pytest.mark.parametrize("library", LIBRARIES)
def test_every_exported_name_is_classed_once(library: str) -> None:
    """No name the driver exports is missing from the list, twice in it or unknown (B009, B010)."""
    exported = _names(library)
    assert len(exported) == LIBRARIES[library][2]
    assert [row.name for row in _rows(library)] == sorted(exported)


@pytest.mark.parametrize("library", LIBRARIES)
def test_every_row_has_a_class_and_a_reason(library: str) -> None:
    """What is not hooked says why."""
    rows = _rows(library)
    assert {row.kind for row in rows} <= CLASSES
    assert [row.name for row in rows if row.kind != "hooked" and len(row.reason) < 6] == []


@pytest.mark.parametrize("library", LIBRARIES)
def test_hooked_names_are_the_rows_of_the_table(library: str) -> None:
    """The list and hooks.def cannot drift apart, and no row names a function the driver never had (B009)."""
    assert {row.name for row in _rows(library) if row.kind == "hooked"} == _hooks(library)


def test_a_passed_memory_effect_names_its_test() -> None:
    """A CUDA function that is passed on although memory moves has a rule and a test of it (B009)."""
    passed = [row for row in _rows("CUDA") if row.kind == "passed"]
    assert [row.name for row in passed if row.test is None] == []
    assert {row.test for row in passed} - _tests() == set()


def test_what_peers_leave_open_is_hooked_or_ruled() -> None:
    """Nothing with a memory effect that another shim leaves without a hook is called harmless here (B009)."""
    kinds = {row.name: row.kind for row in _rows("CUDA")}
    assert {name: kinds[name] for name in UNHOOKED_BY_PEERS if kinds[name] == "none"} == {}


def test_what_nvml_reveals_is_hooked() -> None:
    """Used and free memory, and its users, are shown for this container alone (B120, B123)."""
    kinds = {row.name: row.kind for row in _rows("NVML")}
    assert {name: kinds[name] for name in REVEALING if kinds[name] != "hooked"} == {}


def test_a_name_like_an_allocation_is_never_called_harmless() -> None:
    """A name that makes or imports something is `none` only where a reader of the list can see why (B009)."""
    makers = re.compile(r"(Alloc|Create|Import|Load|Instantiate|Map|Register|Restore|SetLimit|Bind)(?!.*Get)")
    harmless = re.compile(
        r"HostAlloc|AllocHost|HostRegister|AllocationProperties|AllocationGranularity|AllocNodeGetParams|Semaphore|"
        r"cuLink|UserObject|Tex|Surf|EventCreate|TensorMap|cuGraphCreate|ConditionalHandle|AsyncNotification|"
        r"cuLogs|HostGetDevicePointer|ExternalMemoryGetMapped|LoadingMode|IsLoaded|GetRestoreThreadId"
    )
    left = [
        row.name
        for row in _rows("CUDA")
        if row.kind == "none" and makers.search(row.name) and not harmless.search(row.name)
    ]
    assert left == []
