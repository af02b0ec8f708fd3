"""What tests can do to the simulated GPU: faults, delays, the call log, settings, and its state file."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

from conftest import SimEnv
from simgpu_ask import ask, source


def test_faults_strike_the_call_they_name(sim_env: SimEnv) -> None:
    """The third cuMemAlloc_v2 fails, each cuCtxGetDevice does; outputs stay unwritten (B065, B100)."""
    code = """
        init(); p = u64(0xabc); r = [call("cuMemAlloc_v2", C.byref(p), 4096) for _ in range(2)]
        p.value = 0xabc
        r.append(call("cuMemAlloc_v2", C.byref(p), 4096)); kept = p.value; r.append(alloc(4096)[0])
        say(r, kept, ctx_device()[0], ctx_device()[0], used(mib=False) - 106954752 >> 20)
    """
    faults = "cuMemAlloc_v2:3:2,cuCtxGetDevice:*:201"
    assert ask(sim_env(SIMGPU_FAULTS=faults), code) == [[0, 0, 2, 0], 0xABC, 201, 201, 2]


def test_faults_reach_nvml_and_variants_by_their_own_names(sim_env: SimEnv) -> None:
    """A fault of a name is none of its twins', and NVML's names can fail too."""
    code = """
        init(); a = call("cuMemAllocAsync", C.byref(u64()), 1, ptr())
        b = call("cuMemAllocAsync_ptsz", C.byref(u64()), 1, ptr())
        say(a, b, nvml_memory()[0], nvml_memory()[0])
    """
    faults = "cuMemAllocAsync_ptsz:*:2,nvmlDeviceGetMemoryInfo:2:999"
    assert ask(sim_env(SIMGPU_FAULTS=faults), code) == [0, 2, 0, 999]


def test_exports_without_behaviour_answer_alike(sim_env: SimEnv) -> None:
    """NOT_INITIALIZED before cuInit, NOT_SUPPORTED after, and faults on demand."""
    code = """
        a = call("cuGLInit"); init()
        say(a, call("cuGLInit"), call("cuTexRefCreate", C.byref(ptr())), call("cuCheckpointProcessLock", 1,
            ptr()))
    """
    assert ask(sim_env(SIMGPU_FAULTS="cuTexRefCreate:1:2"), code) == [3, 801, 2, 801]


def test_delays_hold_a_call_back(sim_env: SimEnv) -> None:
    """SIMGPU_DELAY in microseconds, before the call takes effect."""
    code = """
        init(); t = time.monotonic(); ok(alloc(4096)); d = time.monotonic() - t; t = time.monotonic()
        ok(free(0))
        say(d >= 0.2, time.monotonic() - t < 0.1)
    """
    assert ask(sim_env(SIMGPU_DELAY="cuMemAlloc_v2:200000"), code) == [True, True]


def test_the_log_has_a_line_for_each_call(sim_env: SimEnv, tmp_path: Path) -> None:
    """pid, thread, name and result, in order, failed and injected calls included."""
    log = tmp_path / "calls"
    code = """
        init(); alloc(4096); alloc(0); t = threading.Thread(target=lambda: alloc(1)); t.start(); t.join()
        nvml_memory(); say(me)
    """
    pid = ask(sim_env(SIMGPU_LOG=str(log), SIMGPU_FAULTS="cuCtxSetCurrent:9:1"), code)
    lines = [line.split() for line in log.read_text().splitlines()]
    assert [(name, int(r)) for _, _, name, r in lines] == [
        ("cuInit", 0), ("cuDevicePrimaryCtxRetain", 0), ("cuCtxSetCurrent", 0), ("cuMemAlloc_v2", 0),
        ("cuMemAlloc_v2", 1), ("cuMemAlloc_v2", 201), ("nvmlInitWithFlags", 0), ("nvmlInit_v2", 0),
        ("nvmlDeviceGetHandleByIndex_v2", 0), ("nvmlDeviceGetMemoryInfo", 0),
    ]  # fmt: skip
    assert {int(p) for p, *_ in lines} == {pid}
    assert [int(t) == pid for _, t, *_ in lines] == [True] * 5 + [False] + [True] * 4


def test_allocation_is_quick(sim_env: SimEnv) -> None:
    """cuMemAlloc and cuMemFree of 2 MiB take under 2 us together, the best of ten from C."""
    code = r"""
        import tempfile
        c = '''#include <stdio.h>\n#include <time.h>\n#include <dlfcn.h>\ntypedef unsigned long long u;
        int main(void) { void *h = dlopen("libcuda.so.1", 2); double best = 1e9;
        int (*init)(unsigned) = dlsym(h, "cuInit"), (*retain)(void **, int) = dlsym(h,
            "cuDevicePrimaryCtxRetain"),
            (*set)(void *) = dlsym(h, "cuCtxSetCurrent"), (*al)(u *, unsigned long) = dlsym(h,
                "cuMemAlloc_v2"),
            (*fr)(u) = dlsym(h, "cuMemFree_v2");
        void *ctx; u p; init(0); retain(&ctx, 0); set(ctx);
        for (int r = 0; r < 10; r++) { struct timespec a, b; clock_gettime(1, &a);
            for (int i = 0; i < 20000; i++) { al(&p, 2 << 20); fr(p); }
            clock_gettime(1, &b); double ns = ((b.tv_sec - a.tv_sec) * 1e9 + b.tv_nsec - a.tv_nsec) / 20000;
            best = ns < best ? ns : best; }
        printf("%.0f", best); return 0; }'''
        with tempfile.TemporaryDirectory() as d:
            open(d + "/a.c", "w").write(c)
            subprocess.run(["cc", "-O2", "-o", d + "/a", d + "/a.c", "-ldl"], check=True)
            say(float(subprocess.run([d + "/a"], capture_output=True, text=True, check=True).stdout))
    """
    assert ask(sim_env(), code) < 2000


def test_the_first_process_settles_the_machine(sim_env: SimEnv) -> None:
    """Model, count and driver are those of the state file, whatever later environments say."""
    ask(sim_env(SIMGPU_MODELS="H200,T4", SIMGPU_COUNT="3", SIMGPU_DRIVER="12040"), "init(); say(1)")
    code = "ok(cu_init()); v = i32(); ok(call('cuDriverGetVersion', C.byref(v)))\n"
    code += "say(v.value, [device_name(i) for i in range(ok(device_count()))])"
    assert ask(sim_env(SIMGPU_MODEL="A100"), code) == [12040, ["NVIDIA H200", "Tesla T4", "NVIDIA H200"]]


def test_a_wrong_setting_or_file_is_no_crash(sim_env: SimEnv, tmp_path: Path) -> None:
    """An unknown model, a foreign or an unreachable state file: cuInit answers OPERATING_SYSTEM."""
    assert ask(sim_env(SIMGPU_MODEL="Voodoo"), "say(cu_init())") == 304
    foreign = tmp_path / "foreign"
    foreign.write_bytes(os.urandom(8192))
    assert ask(sim_env(SIMGPU_STATE=str(foreign)), "say(cu_init())") == 304
    assert ask(sim_env(SIMGPU_STATE=str(tmp_path / "no" / "file")), "say(cu_init())") == 304


def test_many_starts_at_once_make_one_machine(sim_env: SimEnv) -> None:
    """Twelve processes that find no state file agree on one, and on who holds what."""
    env = sim_env()
    code = source("init(); ok(alloc(100 * MIB)); say(nvml_uuid()); sys.stdin.read()")
    children = [
        subprocess.Popen(["python3", "-c", code], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        for _ in range(12)
    ]
    try:
        uuids = {child.stdout.readline() for child in children if child.stdout}
        assert len(uuids) == 1
        assert ask(env, "init(); say(len(nvml_processes()), sim_device_used() >> 20)") == [13, 12 * 202 + 102]
    finally:
        for child in children:
            child.communicate()
    assert ask(env, "init(); say(sim_device_used())") == 106_954_752


def test_exported_names_are_only_those_of_the_driver(sim_dir: Path) -> None:
    """Beside cu*, nvml* and the simgpu_* truths nothing is visible; the driver's soname is there."""
    for library, prefix in (("libcuda.so.1", "cu"), ("libnvidia-ml.so.1", "nvml")):
        listing = subprocess.run(
            ["nm", "-D", "--defined-only", str(sim_dir / library)], capture_output=True, text=True, check=True
        )
        names = [line.split()[-1] for line in listing.stdout.splitlines()]
        assert [n for n in names if not re.match(rf"{prefix}|simgpu_", n)] == []
        dynamic = subprocess.run(
            ["readelf", "-d", str(sim_dir / library)], capture_output=True, text=True, check=True
        )
        assert f"soname: [{library}]" in dynamic.stdout


def test_libraries_call_their_own_exports_as_the_driver_does(sim_dir: Path) -> None:
    """NVML reaches nvmlInitWithFlags where an interposer can be met; the driver reaches nothing so."""
    slots = {}
    for library, prefix in (("libcuda.so.1", "cu"), ("libnvidia-ml.so.1", "nvml")):
        listing = subprocess.run(
            ["readelf", "-rW", str(sim_dir / library)], capture_output=True, text=True, check=True
        )
        slots[library] = set(re.findall(rf"(?:JUMP_SLOT?|GLOB_DAT)\s+\S+\s+({prefix}\w+)", listing.stdout))
    assert slots == {"libcuda.so.1": set(), "libnvidia-ml.so.1": {"nvmlInit_v2", "nvmlInitWithFlags"}}
