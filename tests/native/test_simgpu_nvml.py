"""The simulated NVML and its nvidia-smi: life, handles, memory, processes, MIG, and the views agree."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from conftest import SimEnv
from simgpu_ask import Client, ask

CONTEXT = 106_954_752

RAW = """
ml = C.CDLL("libnvidia-ml.so.1")
def n(name, *args): return getattr(ml, name)(*args)
"""


def smi(env: dict[str, str], sim_dir: Path, *arguments: str) -> str:
    """What nvidia-smi prints."""
    command = [str(sim_dir / "nvidia-smi"), *arguments]
    return subprocess.run(command, env=env, capture_output=True, text=True, check=True, timeout=30).stdout


def test_initialisations_are_counted(sim_env: SimEnv) -> None:
    """Calls answer UNINITIALIZED before the first and after the last; error texts work always."""
    code = (
        RAW
        + """
c = u32(); ml.nvmlErrorString.restype = C.c_char_p
early = n("nvmlDeviceGetCount_v2", C.byref(c)), n("nvmlShutdown"), ml.nvmlErrorString(1).decode()
a = [n("nvmlInit_v2"), n("nvmlInit"), n("nvmlInitWithFlags", 0), n("nvmlShutdown"), n("nvmlShutdown")]
b = [n("nvmlDeviceGetCount_v2", C.byref(c)), c.value, n("nvmlShutdown"), n("nvmlDeviceGetCount_v2",
    C.byref(c))]
say(early, a, b)
"""
    )
    assert ask(sim_env(), code) == [[1, 1, "Uninitialized"], [0] * 5, [0, 1, 0, 1]]


def test_unattached_initialisation_sees_no_device(sim_env: SimEnv) -> None:
    """NO_ATTACH: no device, index is an invalid argument, UUID and PCI are not found."""
    code = (
        RAW
        + """
init(); uuid = nvml_uuid(); n("nvmlShutdown"); n("nvmlInitWithFlags", 2); c, h = u32(9), ptr()
say(n("nvmlDeviceGetCount_v2", C.byref(c)), c.value, n("nvmlDeviceGetHandleByIndex_v2", 0, C.byref(h)),
    n("nvmlDeviceGetHandleByUUID", uuid.encode(), C.byref(h)),
    n("nvmlDeviceGetHandleByPciBusId_v2", b"00000000:0B:00.0", C.byref(h)))
"""
    )
    assert ask(sim_env(), code) == [0, 0, 2, 6, 6]


def test_all_ways_lead_to_the_same_handle(sim_env: SimEnv) -> None:
    """Index, UUID, PCI bus id of either length and serial; CUDA's UUID is NVML's."""
    code = (
        RAW
        + """
init(1); h = nvml_handle(1); uuid = nvml_uuid(1); buf = C.create_string_buffer(64); pci = (C.c_ubyte * 128)()
n("nvmlDeviceGetPciInfo_v3", h, pci); bus = bytes(pci)[36:68].rstrip(bytes(1))
n("nvmlDeviceGetSerial", h, buf, 64)
def by(name, key): p = ptr(); r = n(name, key, C.byref(p)); return (r, p.value == h.value)
index, minor = u32(), u32(); n("nvmlDeviceGetIndex", h, C.byref(index))
n("nvmlDeviceGetMinorNumber", h, C.byref(minor))
say(by("nvmlDeviceGetHandleByUUID", uuid.encode()), by("nvmlDeviceGetHandleByPciBusId_v2", bus),
    by("nvmlDeviceGetHandleByPciBusId_v2", bus[4:]), by("nvmlDeviceGetHandleBySerial", buf.value),
    by("nvmlDeviceGetHandleByUUID", b"GPU-00000000-0000-0000-0000-000000000000")[0], index.value, minor.value,
    uuid[4:].replace("-", "") == device_uuid(1), len({nvml_uuid(i) for i in range(4)}))
"""
    )
    same = [0, True]
    assert ask(sim_env(SIMGPU_COUNT="4"), code) == [same, same, same, same, 6, 1, 1, True, 4]


def test_memory_figures_add_up(sim_env: SimEnv) -> None:
    """v2: total = reserved + used + free; v1: used holds the reserved part; versions are checked."""
    code = (
        RAW
        + """
init(); ok(alloc(GIB)); m = ok(nvml_memory_v2()); r, total, spare, used1 = nvml_memory()
w = Memory2(version=1)
say(m.total == m.reserved + m.used + m.free, used1 == m.reserved + m.used, spare == m.free,
    m.used, n("nvmlDeviceGetMemoryInfo_v2", nvml_handle(), C.byref(w)), n("nvmlDeviceGetMemoryInfo",
        nvml_handle(), None))
"""
    )
    assert ask(sim_env(), code) == [True, True, True, CONTEXT + (1 << 30), 25, 2]


def test_process_lists_follow_the_size_protocol(sim_env: SimEnv) -> None:
    """Too little room says how much; the three versions agree; there are no graphics or MPS processes."""
    code = (
        RAW
        + """
init(); h = nvml_handle(); c = u32(0)
few = n("nvmlDeviceGetComputeRunningProcesses_v3", h, C.byref(c), None), c.value
class P1(C.Structure): _fields_ = [("pid", u32), ("bytes", u64)]
def ask(name, kind):
    c, a = u32(8), (kind * 8)(); return (n(name, h, C.byref(c), a), c.value, a[0].pid - me, a[0].bytes)
kinds = (("", P1), ("_v2", ProcessInfo), ("_v3", ProcessInfo))
say(few, [ask("nvmlDeviceGetComputeRunningProcesses" + v, k) for v, k in kinds])
say([ask(f"nvmlDeviceGet{k}RunningProcesses_v3", ProcessInfo)[:2] for k in ("Graphics", "MPSCompute")])
"""
    )
    assert ask(sim_env(), code) == [[[7, 1], [[0, 1, 0, CONTEXT]] * 3], [[0, 0], [0, 0]]]


def test_utilisation_is_what_the_test_sets(sim_env: SimEnv) -> None:
    """The device shows it, its processes share it."""
    code = (
        RAW
        + """
init(); h = nvml_handle(); u = (u32 * 2)(); cu.simgpu_set_utilization(0, 80, 40)
n("nvmlDeviceGetUtilizationRates", h, u)
class S(C.Structure): _fields_ = [("pid", u32), ("at", u64), ("sm", u32), ("mem", u32), ("enc", u32), ("dec",
    u32)]
c, a = u32(4), (S * 4)(); r = n("nvmlDeviceGetProcessUtilization", h, a, C.byref(c), u64(0))
say(list(u), r, c.value, a[0].pid == me, a[0].sm)
"""
    )
    assert ask(sim_env(), code) == [[80, 40], 0, 1, True, 80]


def test_nvml_can_fail_later_and_lack_memory_figures(sim_env: SimEnv) -> None:
    """SIMGPU_NVML_FAIL_AFTER gives 999 from then on; SIMGPU_NVML_NO_MEMORY gives NOT_SUPPORTED (B128)."""
    code = (
        RAW
        + """
init(); a = nvml_memory()[0]; h = nvml_handle(); time.sleep(0.4)
say(a, nvml_memory(handle=h)[0], mem_info()[0])
"""
    )
    assert ask(sim_env(SIMGPU_NVML_FAIL_AFTER="0.3"), code) == [0, 999, 0]
    assert ask(sim_env(SIMGPU_NVML_NO_MEMORY="1"), code) == [3, 3, 0]


def test_nvidia_smi_shows_the_card_and_its_processes(sim_env: SimEnv, sim_dir: Path) -> None:
    """Table, queries, list and compute apps agree with the truth."""
    env = sim_env(SIMGPU_COUNT="2")
    assert re.search(r"\|\s+0MiB / 15360MiB \|", smi(env, sim_dir))
    assert "No running processes found" in smi(env, sim_dir)
    with Client(env, "init(1); ok(alloc(3 * GIB))") as client:
        table = smi(env, sim_dir)
        assert re.search(r"\|\s+3174MiB / 15360MiB \|", table)
        assert re.search(rf"\|\s+1\s+N/A\s+N/A\s+{client.pid}\s+C\s.*3174MiB \|", table)
        fields = "index,name,memory.total,memory.used,memory.free"
        rows = smi(env, sim_dir, f"--query-gpu={fields}", "--format=csv,noheader,nounits").splitlines()
        assert rows == ["0, Tesla T4, 15360, 0, 15095", "1, Tesla T4, 15360, 3174, 11921"]
        apps = smi(env, sim_dir, "--query-compute-apps=pid,used_memory", "--format=csv")
        assert apps == f"pid, used_memory [MiB]\n{client.pid}, 3174 MiB\n"
    assert re.fullmatch(r"(GPU \d: Tesla T4 \(UUID: GPU-[0-9a-f-]{36}\)\n){2}", smi(env, sim_dir, "-L"))


def test_mig_instances_are_devices_of_their_own(sim_env: SimEnv, sim_dir: Path) -> None:
    """Two 3g.40gb: CUDA sees the first or the one named; the parent shows the sum, and instance ids."""
    env = sim_env(SIMGPU_MODEL="A100-MIG3g")
    uuids = re.findall(r"MIG-[0-9a-f-]{36}", smi(env, sim_dir, "-L"))
    assert len(uuids) == 2
    code = (
        RAW
        + """
init(); ok(alloc(GIB)); h = nvml_handle(0); m = ptr(); uuids = []; buf = C.create_string_buffer(96)
a, b = u32(), u32()
n("nvmlDeviceGetMigMode", h, C.byref(a), C.byref(b)); infos, c = (ProcessInfo * 4)(), u32(4)
for i in (0, 1):
    n("nvmlDeviceGetMigDeviceHandleByIndex", h, i, C.byref(m))
    uuids.append((nvml_uuid(handle=m), nvml_memory_v2(handle=m)[1].used >> 20))
n("nvmlDeviceGetComputeRunningProcesses_v3", h, C.byref(c), infos)
say(ok(device_count()), a.value, device_uuid(), uuids, nvml_memory_v2()[1].used >> 20, infos[0].gpu_instance,
    device_name())
"""
    )
    for chosen, uuid in enumerate(uuids):
        count, mode, own, instances, total, gi, name = ask({**env, "CUDA_VISIBLE_DEVICES": uuid}, code)
        assert (count, mode, total, gi) == (1, 1, 210 + 1024, chosen + 1)
        assert own == uuid[4:].replace("-", "")
        assert dict(instances) == {u: (210 + 1024) * (u == uuid) for u in uuids}
        assert name.endswith("MIG 3g.40gb")
    assert ask(env, "init(); say(ok(device_count()), device_uuid())") == [1, uuids[0][4:].replace("-", "")]


@pytest.mark.parametrize(
    ("visible", "order", "expected"),
    [
        (None, None, [0, 1, 2]), (None, "reverse", [2, 1, 0]), ("2,0", None, [2, 0]), ("0", "reverse", [2]),
        ("1,7,0", None, [1]), ("", None, 100), ("-1", None, 100), ("NoDevFiles", None, 100), ("0,0", None,
            100),
        ("UUID2,UUID0", None, [2, 0]), ("SHORT1", None, [1]), (" 1 , 2", None, [1, 2]),
    ],
)  # fmt: skip
def test_visible_devices_are_chosen_as_the_driver_does(
    sim_env: SimEnv, sim_dir: Path, visible: str | None, order: str | None, expected: list[int] | int
) -> None:
    """Indices, orders, UUIDs and their beginnings, wrong ones that end the list, and none at all."""
    env = sim_env(SIMGPU_COUNT="3", SIMGPU_CUDA_ORDER=order)
    uuids = re.findall(r"GPU-[0-9a-f-]{36}", smi(env, sim_dir, "-L"))
    if visible is not None:
        visible = re.sub(r"UUID(\d)", lambda m: uuids[int(m[1])], visible)
        env["CUDA_VISIBLE_DEVICES"] = re.sub(r"SHORT(\d)", lambda m: uuids[int(m[1])][:9], visible)
    code = "r = cu_init(); say(r or [device_uuid(i) for i in range(ok(device_count()))])"
    plain = [u[4:].replace("-", "") for u in uuids]
    assert ask(env, code) == (expected if isinstance(expected, int) else [plain[i] for i in expected])
