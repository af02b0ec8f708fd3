"""Which function a look-up answers: ours exactly where the driver's answer is a row of the table."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import NATIVE_TESTS, ROOT, RunClient, SimEnv

DATA = ROOT / "tests" / "data"
TABLE = (ROOT / "native" / "shim" / "hooks.def").read_text()
HOOKED = set(re.findall(r"^HOOK\(\w+, (\w+),", TABLE, re.MULTILINE))
EXPORTED = {
    "libcuda.so.1": (DATA / "libcuda-580.159-symbols.txt").read_text().split(),
    "libnvidia-ml.so.1": (DATA / "libnvidia-ml-580.159-symbols.txt").read_text().split(),
}
INVENTED = ["cuFoo_v9", "cuBar_v9", "cuMemAlloc_v9"]

# Prints, for each name of a list on standard input, the file whose code the address lies in.
WHERE = """
import ctypes as C, json, os, sys
library, names = json.load(sys.stdin)
class Info(C.Structure):
    _fields_ = [("file", C.c_char_p), ("base", C.c_void_p), ("name", C.c_char_p), ("address", C.c_void_p)]
dladdr = C.CDLL(None).dladdr
def where(address):
    info = Info()
    assert dladdr(C.c_void_p(address), C.byref(info))
    return os.path.basename(info.file.decode())
handle = C.CDLL(library)
def address(name):
    return C.cast(getattr(handle, name), C.c_void_p).value if hasattr(handle, name) else None
found = {name: address(name) for name in names}
"""

Ask = Callable[..., object]


@pytest.fixture
def ask(run_client: RunClient) -> Ask:
    """Runs WHERE and more in a client and returns what it prints as JSON."""

    def run(env: dict[str, str], library: str, names: list[str], code: str) -> object:
        done = run_client(WHERE + code, env, input=json.dumps([library, names]))
        assert done.stderr == ""
        return json.loads(done.stdout)

    return run


FILES = "print(json.dumps({name: where(a) if a else None for name, a in found.items()}))"


@pytest.mark.parametrize("library", EXPORTED)
def test_dlsym_gives_ours_for_the_rows_and_the_drivers_own_for_the_rest(
    sim_env: SimEnv, ask: Ask, library: str
) -> None:
    """Each exported name, by handle: a row gives our body, any other the driver's pointer (B010, B024)."""
    names = EXPORTED[library] + (INVENTED if "cuda" in library else [])
    found = ask(sim_env(preload=True, limit="1g"), library, names, FILES)
    assert found == {name: "libvgpu.so" if name in HOOKED else library for name in names}


def _recorded_names() -> list[str]:
    lines = (DATA / "cuGetProcAddress-580.159.txt").read_text().splitlines()
    return [line.split()[0] for line in lines if line.strip() and not line.startswith("#")]


def _base_names() -> list[str]:
    """What programs ask cuGetProcAddress for: the names without version and stream suffix."""
    plain = {re.sub(r"(_v\d)?(_pt[sd]s|_ptsz|_ptds)?$", "", name) for name in HOOKED if name[:2] == "cu"}
    return sorted(plain | set(_recorded_names()))


# Names each answer by the exported symbol whose dlsym address it is.
RESOLVE = """
by_address = {a: name for name, a in found.items() if a}
versions = [2000, 3020, 4000, 6050, 7000, 9000, 11000, 11020, 11030, 11040, 12000, 12010, 12040, 12080, 13000]
v1, v2 = handle.cuGetProcAddress, handle.cuGetProcAddress_v2
answers = {}
for base in json.loads(sys.argv[1]):
    for version in versions:
        for flags in (0, 1, 2):
            one, two, status = C.c_void_p(), C.c_void_p(), C.c_int(-1)
            r1 = v1(base.encode(), C.byref(one), version, C.c_uint64(flags))
            r2 = v2(base.encode(), C.byref(two), version, C.c_uint64(flags), C.byref(status))
            named = [a.value and by_address[a.value] for a in (one, two)]
            answers[f"{base} {version} {flags}"] = [r1, r2, status.value, *named]
print(json.dumps(answers))
"""


def test_cugetprocaddress_reaches_the_variant_the_driver_would(
    sim_env: SimEnv, run_client: RunClient
) -> None:
    """For each name, version and flag, v1 and v2 give the symbol that the bare driver gives (B016, B022)."""

    def resolve(env: dict[str, str]) -> dict[str, list[object]]:
        given = json.dumps(["libcuda.so.1", EXPORTED["libcuda.so.1"]])
        done = run_client(WHERE + RESOLVE, env, json.dumps(_base_names()), input=given)
        answers: dict[str, list[object]] = json.loads(done.stdout)
        return answers

    bare = resolve(sim_env())
    assert bare["cuMemAlloc 3020 0"] == [0, 0, 0, "cuMemAlloc_v2", "cuMemAlloc_v2"]
    assert bare["cuMemAllocAsync 13000 2"][3] == "cuMemAllocAsync_ptsz"
    assert bare["cuCtxCreate 12010 0"][3] == "cuCtxCreate_v3"
    assert resolve(sim_env(preload=True, limit="1g")) == bare


def test_names_the_driver_invents_later_are_its_own(sim_env: SimEnv, ask: Ask) -> None:
    """cuGetProcAddress of a name outside the table answers the driver's pointer, not ours (B010)."""
    code = """
answers = []
for name in found:
    pointer = C.c_void_p()
    r = handle.cuGetProcAddress_v2(name.encode(), C.byref(pointer), 13000, C.c_uint64(0), None)
    answers.append([r, pointer.value and where(pointer.value), pointer.value == found[name]])
print(json.dumps(answers))
"""
    names = ["cuCtxGetCurrent", "cuDeviceGetCount", "cuFoo"]
    bare = ask(sim_env(), "libcuda.so.1", names, code)
    shimmed = ask(sim_env(preload=True, limit="1g"), "libcuda.so.1", names, code)
    assert shimmed == bare
    assert bare[:2] == [[0, "libcuda.so.1", True]] * 2  # type: ignore[index]


def test_an_old_drivers_missing_functions_stay_missing(sim_env: SimEnv, sim_dir: Path, ask: Ask) -> None:
    """A driver without cuGetProcAddress and pools: names it lacks are absent, the rest is limited (B020)."""
    code = """
present = {name: where(a) for name, a in found.items() if a}
sys.path.insert(0, os.environ["TESTS"])
import simclient as s
s.init(0)
print(json.dumps([present, s.alloc(2 << 30)[0], s.free(s.ok(s.alloc(1 << 20)))]))
"""
    names = EXPORTED["libcuda.so.1"]
    old = {"LD_LIBRARY_PATH": f"{sim_dir / 'old'}:{sim_dir}", "TESTS": str(NATIVE_TESTS)}
    bare = ask(sim_env(**old), "libcuda.so.1", names, code)
    shimmed = ask(sim_env(preload=True, limit="1g", **old), "libcuda.so.1", names, code)
    assert isinstance(bare, list) and isinstance(shimmed, list)
    assert {"cuGetProcAddress_v2", "cuMemAllocAsync", "cuLibraryLoadData"}.isdisjoint(bare[0])
    assert shimmed[0] == {name: "libvgpu.so" if name in HOOKED else "libcuda.so.1" for name in bare[0]}
    assert (bare[1:], shimmed[1:]) == ([0, 0], [2, 0])


def test_a_second_copy_of_the_driver_is_no_way_past(
    sim_env: SimEnv, sim_dir: Path, run_client: RunClient, tmp_path: Path
) -> None:
    """A copy of the driver under another path, opened after the first, gives our bodies too (B011)."""
    copy = tmp_path / "compat" / "libcuda.so.580"
    copy.parent.mkdir()
    copy.write_bytes((sim_dir / "libcuda.so.1").read_bytes())
    code = f"""
from simclient import *
init(0)
other = C.CDLL({str(copy)!r})
p = u64()
print(other.cuMemAlloc_v2(C.byref(p), u64(2 << 30)))
"""
    assert run_client(code, sim_env(preload=True, limit="1g")).stdout == "2\n"


ORDERS = {
    "nvml only": "n2 m ns",
    "nvml then cuda": "n2 c a m",
    "cuda then nvml": "c a n2 m",
    "plain init": "n1 m c a",
    "with flags": "nf m c a",
    "shut and again": "n2 ns n2 c a m ns n2 m",
    "twice": "n2 n2 c c a m ns m ns",
}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("threads", [1, 2])
def test_any_order_of_starting_works(
    sim_env: SimEnv, run_client: RunClient, order: str, threads: int
) -> None:
    """NVML and CUDA are started in any order, twice, and from two threads (B027, B028)."""
    code = f"""
import ctypes as C, threading
nvml = lambda: C.CDLL("libnvidia-ml.so.1")
cuda = lambda: C.CDLL("libcuda.so.1")
def alloc():
    context, pointer = C.c_void_p(), C.c_uint64()
    cuda().cuDevicePrimaryCtxRetain(C.byref(context), 0)
    cuda().cuCtxSetCurrent(context)
    return cuda().cuMemAlloc_v2(C.byref(pointer), C.c_size_t(2 << 30)) - 2
def memory():
    device, figures = C.c_void_p(), (C.c_uint64 * 3)()
    nvml().nvmlDeviceGetHandleByIndex_v2(0, C.byref(device))
    return nvml().nvmlDeviceGetMemoryInfo(device, figures) or figures[0] - (1 << 30)
steps = dict(n1=lambda: nvml().nvmlInit(), n2=lambda: nvml().nvmlInit_v2(), ns=lambda: nvml().nvmlShutdown(),
             nf=lambda: nvml().nvmlInitWithFlags(0), c=lambda: cuda().cuInit(0), a=alloc, m=memory)
results = []
def work():
    results.append([steps[name]() for name in {ORDERS[order].split()!r}])
threads = [threading.Thread(target=work) for _ in range({threads})]
[t.start() for t in threads]
[t.join(10) for t in threads]
print(set(sum(results, [])), len(results))
"""
    done = run_client(code, sim_env(preload=True, limit="1g"), timeout=20)
    assert (done.stdout, done.stderr) == (f"{{0}} {threads}\n", "")
