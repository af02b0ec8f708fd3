"""Programs that reach the driver in each way there is: the same limit, no loop, nothing else disturbed."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import NATIVE_TESTS, RunClient, SimEnv

CC = shutil.which("gcc") or shutil.which("cc")
CLIENTS = NATIVE_TESTS / "clients"
WAYS = ["dlsym", "program", "default", "next", "proc1", "proc2", "self"]

pytestmark = pytest.mark.skipif(CC is None, reason="needs a C compiler")

Build = Callable[..., Path]


@pytest.fixture(scope="session")
def build(tmp_path_factory: pytest.TempPathFactory) -> Build:
    """Compiles a client of tests/native/clients; the same arguments give the same file."""
    folder = tmp_path_factory.mktemp("clients")

    def compile(source: str, *arguments: str, name: str = "") -> Path:
        target = folder / (name or source)
        if not target.exists():
            command = [str(CC), "-O1", "-Wall", "-Wextra", "-o", str(target), str(CLIENTS / f"{source}.c")]
            subprocess.run([*command, *arguments, "-ldl", "-lpthread"], check=True)
        return target

    return compile


@pytest.fixture(scope="session")
def linked(build: Build, sim_dir: Path) -> Path:
    """The client that the loader binds to the driver, as nvcc's -lcuda makes it."""
    return build("reach", "-DLINKED", str(sim_dir / "libcuda.so.1"), name="linked")


@pytest.fixture(scope="session")
def interposer(build: Build) -> Path:
    """Another preloaded library."""
    return build("interposer", "-shared", "-fPIC", "-fno-builtin", name="interposer.so")


def _run(program: Path | str, env: dict[str, str], *arguments: str) -> str:
    done = subprocess.run([program, *arguments], env=env, capture_output=True, text=True, timeout=20)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_every_way_is_stopped_at_the_same_byte(sim_env: SimEnv, build: Build, linked: Path) -> None:
    """By link, any dlsym and both cuGetProcAddress, the largest grant is one figure (B011, B019)."""
    env = sim_env(preload=True, limit="4147m")
    granted = {way: int(_run(build("reach"), env, way)) for way in WAYS}
    granted["linked"] = int(_run(linked, env))
    assert len(set(granted.values())) == 1, granted
    assert 3 << 30 < granted["linked"] <= 4147 << 20
    assert int(_run(linked, sim_env())) > 4147 << 20


@pytest.mark.parametrize("first", ["shim", "interposer"])
def test_another_interposer_works_in_either_order(
    sim_env: SimEnv, libvgpu: Path, interposer: Path, build: Build, linked: Path, first: str
) -> None:
    """A tool that wraps the same call and malloc, before us or behind us, changes no limit (B105, B157)."""
    alone = _run(linked, sim_env(preload=True, limit="1g"))
    order = [libvgpu, interposer] if first == "shim" else [interposer, libvgpu]
    env = sim_env(preload=True, limit="1g", LD_PRELOAD=":".join(map(str, order)))
    assert _run(linked, env) == alone
    assert [_run(build("reach"), env, way) for way in ("dlsym", "proc2")] == [alone] * 2


@pytest.mark.parametrize("way", ["handle", "next"])
@pytest.mark.parametrize("reach", ["dlsym", "proc2"])
def test_a_profiler_that_stands_in_for_the_driver_works(
    sim_env: SimEnv, libvgpu: Path, sim_dir: Path, build: Build, tmp_path: Path, way: str, reach: str
) -> None:
    """A tool whose library is opened in the driver's place sees the calls, and the limit holds behind it, for
    what the tool takes itself too."""
    launcher = build("profiler", "-shared", "-fPIC", "-DLAUNCHER", name="launcher.so")
    linked_to = ["-Wl,-Bsymbolic", "-Wl,--no-as-needed", str(sim_dir / "libcuda.so.1")]
    stand_in = build("profiler", "-shared", "-fPIC", *linked_to, name="profiler.so")
    mark = tmp_path / "called"
    more = {"PROFILER": str(stand_in), "PROFILER_WAY": way, "PROFILER_MARK": str(mark)}
    env = sim_env(preload=True, limit="1g", **more)
    alone = _run(build("reach"), sim_env(preload=True, limit="1g"), reach)
    env |= {"LD_PRELOAD": f"{launcher}:{libvgpu}"}
    assert _run(build("reach"), env, reach) == alone
    assert mark.exists()
    own = 256 << 20
    assert int(_run(build("reach"), env | {"PROFILER_OWN": str(own)}, reach)) == int(alone) - own


@pytest.mark.parametrize("preload", [False, True])
def test_names_that_only_look_like_the_drivers_are_left_alone(
    sim_env: SimEnv, interposer: Path, libvgpu: Path, tmp_path: Path, run_client: RunClient, preload: bool
) -> None:
    """cudnn, cublas, curl and invented names of 20 libraries answer from their own library (B024)."""
    copies = [tmp_path / f"libother{number}.so" for number in range(20)]
    for copy in copies:
        shutil.copy(interposer, copy)
    names = "cudnnCreate cublasCreate_v2 cufftPlan1d curl_easy_init cupsGetDests cudaMalloc cuFooBar"
    names += " nvmlSomething cu cuMemAlloc_v99"
    code = f"""
import ctypes as C, sys
for path in sys.argv[1:]:
    other = C.CDLL(path)
    assert [getattr(other, name)() for name in {names.split()!r}] == list(range(1, 11)), path
    assert not hasattr(other, "cudnnDestroy")
print("same")
"""
    odd = tmp_path / "odd dir"
    odd.mkdir()
    moved = shutil.copy(libvgpu, odd / "libvgpu.so")
    env = sim_env(preload=preload, limit="1g") | ({"LD_PRELOAD": "libvgpu.so"} if preload else {})
    env["LD_LIBRARY_PATH"] += f":{Path(moved).parent}"
    assert run_client(code, env, *map(str, copies)).stdout == "same\n"


@pytest.mark.parametrize("driver", ["sim", ""])
def test_early_and_racing_look_ups_are_served(
    sim_env: SimEnv, build: Build, libvgpu: Path, sim_dir: Path, driver: str
) -> None:
    """Constructors look names up before anything ran, then four threads race the first call (B026)."""
    env = sim_env(preload=True, limit="1g")
    if not driver:
        env["LD_LIBRARY_PATH"] = "/nonexistent"
    found, wrong = _run(build("early"), env).splitlines()
    assert found == "0 0 1"
    assert wrong == ("0" if driver else "4")


def test_constructors_of_a_program_linked_to_the_driver_find_it(
    sim_env: SimEnv, build: Build, sim_dir: Path
) -> None:
    """With the driver among the program's libraries, early look-ups give a function at once (B026)."""
    flags = ("-Wl,--no-as-needed", str(sim_dir / "libcuda.so.1"))
    shimmed = _run(build("early", *flags, name="early_linked"), sim_env(preload=True, limit="1g"))
    assert shimmed == _run(build("early", *flags, name="early_linked"), sim_env()) == "1 1 1\n0\n"


def test_without_a_driver_its_names_are_absent(sim_env: SimEnv, run_client: RunClient) -> None:
    """No driver on the machine: RTLD_DEFAULT answers NULL for its names, with dlerror's text (B021, B177)."""
    code = """
import ctypes as C
own = C.CDLL(None)
libc = C.CDLL("libc.so.6")
libc.dlsym.restype = libc.dlerror.restype = C.c_void_p
names = [b"cuInit", b"cuMemAlloc_v2", b"nvmlInit_v2", b"nvmlDeviceGetMemoryInfo", b"cuGetProcAddress"]
print([hasattr(own, name.decode()) for name in names])
"""
    env = sim_env(preload=True, limit="1g", LD_LIBRARY_PATH="/nonexistent")
    assert run_client(code, env).stdout == f"{[False] * 5}\n"


def test_calls_before_cuinit_are_answered_by_the_driver(sim_env: SimEnv, run_client: RunClient) -> None:
    """Entry points called before cuInit give the driver's own word, not a crash (B029)."""
    code = """
from simclient import *
import re
table = open(TABLE).read()
names = re.findall(r"^HOOK\\(CUDA, (\\w+),", table, re.MULTILINE)
skip = "Init|ProcAddress|Launch|_v1"
zeros = [C.c_uint64(0)] * 12
print({name: getattr(cu, name)(*zeros) for name in names if not re.search(skip, name)})
""".replace("TABLE", repr(str(NATIVE_TESTS.parents[1] / "native" / "shim" / "hooks.def")))
    bare = run_client(code, sim_env())
    shimmed = run_client(code, sim_env(preload=True, limit="1g"))
    assert "'cuMemAlloc_v2': 3" in bare.stdout or "'cuMemAlloc_v2': 1" in bare.stdout
    assert (shimmed.stdout, shimmed.stderr) == (bare.stdout, "")


def test_the_drivers_own_look_ups_reach_the_driver(
    sim_env: SimEnv, run_client: RunClient, tmp_path: Path
) -> None:
    """A driver that looks its own names up inside cuInit is answered with its own functions (B023)."""
    log = tmp_path / "log"
    code = "from simclient import *; print(cu_init(), init(0) > 0, alloc(2 << 30)[0])"
    env = sim_env(preload=True, limit="1g", SIMGPU_SELFLOOKUP="1", SIMGPU_LOG=str(log))
    assert run_client(code, env, timeout=10).stdout == "0 True 2\n"


def test_nvmls_re_entry_into_itself_ends(sim_env: SimEnv, run_client: RunClient, tmp_path: Path) -> None:
    """nvmlInit_v2 that calls nvmlInitWithFlags through the PLT runs each once (B027)."""
    log = tmp_path / "log"
    code = "import ctypes as C; print(C.CDLL('libnvidia-ml.so.1').nvmlInit_v2())"
    env = sim_env(preload=True, limit="1g", SIMGPU_LOG=str(log))
    assert run_client(code, env, timeout=10).stdout == "0\n"
    calls = [line.split()[2] for line in log.read_text().splitlines()]
    assert sorted(calls) == ["nvmlInitWithFlags", "nvmlInit_v2"]
