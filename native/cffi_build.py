"""What is compiled, from which sources and with which flags: the one list of this project.

Three products come from here:

* ``isolator/lib/<arch>/libvgpu.so``, by zig for glibc 2.17, so that one floor serves every tenant image;
* ``isolator/sim/``, the simulated GPU, by zig for the architecture of this machine;
* ``isolator._core``, the cffi extension, by the compiler of this machine.

``setup.py`` calls it. An object is compiled again only when its command or a file it includes changed, and
results are put in place by rename: running programs keep the file they have mapped.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from cffi import FFI

ROOT = Path(__file__).resolve().parent.parent
NATIVE = ROOT / "native"
BUILD = ROOT / "build" / "native"

ARCHITECTURES = ("x86_64", "aarch64")
GLIBC = "2.17"
JOBS = 2


def _glob(*patterns: str) -> list[Path]:
    return sorted(path for pattern in patterns for path in NATIVE.glob(pattern))


CORE_SOURCES = _glob("core/*.c")
SHIM_SOURCES = _glob("shim/*.c", "shim/*.S")
SIM_SOURCES = {
    "cuda": _glob("simgpu/sim_*.c", "simgpu/cuda_*.c"),
    "nvml": _glob("simgpu/sim_*.c", "simgpu/nvml_*.c"),
    "smi": _glob("simgpu/nvidia_smi.c"),
}

CDEF_HEADERS = (NATIVE / "core" / "region.h", NATIVE / "core" / "core.h")

WARNINGS = ["-Wall", "-Wextra", "-Wconversion", "-Wshadow", "-Wmissing-prototypes", "-Werror"]
# The simulator spells vendor signatures: unused parameters are the rule there, and sizes are theirs.
SIM_WARNINGS = ["-Wall", "-Wextra", "-Wshadow", "-Wno-unused-parameter", "-Werror"]
COMMON = ["-O2", "-std=gnu11", "-fPIC", "-fvisibility=hidden"]
LINK = ["-s", "-Wl,-z,defs", "-Wl,-z,relro", "-Wl,-z,now"]
SYSTEM = ["-ldl", "-lpthread", "-lrt"]


class BuildError(Exception):
    """A product could not be built; says what to do in one line, or what the compiler said."""


@dataclass(frozen=True)
class Product:
    """One shared library or program."""

    output: str
    arch: str
    sources: list[Path]
    flags: list[str]
    soname: str | None = None

    @property
    def work(self) -> Path:
        """Folder of its objects; two products may share a source but not the flags."""
        return BUILD / self.output.replace("/", "_")


def version() -> str:
    """The project's version, read from the one place that states it."""
    text = (ROOT / "isolator" / "__init__.py").read_text()
    found = re.search(r'^__version__ = "([^"]+)"$', text, re.MULTILINE)
    if not found:
        raise BuildError("isolator/__init__.py states no __version__")
    return found.group(1)


def host_arch() -> str:
    """This machine's architecture under the name the product uses."""
    machine = platform.machine().lower()
    return {"amd64": "x86_64", "arm64": "aarch64"}.get(machine, machine)


def vendor_include() -> tuple[Path, str]:
    """Where cuda.h and nvml.h are, and which versions: from the two header packages of the build."""
    folder, versions = None, []
    for package, header in (("nvidia-cuda-runtime", "cuda.h"), ("nvidia-nvml-dev", "nvml.h")):
        try:
            found = importlib.metadata.distribution(package)
        except importlib.metadata.PackageNotFoundError:
            raise BuildError(f"the simulator needs {header}: pip install '{package}==13.0.*'") from None
        paths = [found.locate_file(f) for f in found.files or [] if f.name == header]
        if not paths:
            raise BuildError(f"{package} {found.version} carries no {header}: install 13.0.*")
        folder = Path(str(paths[0])).parent
        versions.append(f"{package} {found.version}")
    assert folder is not None
    return folder, ", ".join(versions)


def products(only: str = "") -> list[Product]:
    """Everything zig builds; `only` keeps the outputs that start with it."""
    stated = f'-DISOLATOR_VERSION="{version()}"'
    include = ["-Inative/core", "-Inative/shim"]
    flags = [*COMMON, *WARNINGS, *include, stated]
    shim = [*CORE_SOURCES, *SHIM_SOURCES] if SHIM_SOURCES else []
    listed = [Product(f"lib/{arch}/libvgpu.so", arch, shim, flags, "libvgpu.so") for arch in ARCHITECTURES]
    if any(SIM_SOURCES.values()) and "sim/".startswith(only[:4]):
        headers, versions = vendor_include()
        sim = [*COMMON, *SIM_WARNINGS, *include, "-Inative/simgpu", "-isystem", str(headers)]
        sim += [stated, f'-DSIM_HEADERS="{versions}"']
        host, cuda = host_arch(), SIM_SOURCES["cuda"]
        listed += [
            Product("sim/libcuda.so.1", host, cuda, sim, "libcuda.so.1"),
            Product("sim/old/libcuda.so.1", host, cuda, [*sim, "-DSIM_OLD_DRIVER"], "libcuda.so.1"),
            Product("sim/libnvidia-ml.so.1", host, SIM_SOURCES["nvml"], sim, "libnvidia-ml.so.1"),
            Product("sim/nvidia-smi", host, SIM_SOURCES["smi"], sim),
        ]
    return [product for product in listed if product.sources and product.output.startswith(only)]


def _zig(arch: str) -> list[str]:
    return [sys.executable, "-m", "ziglang", "cc", "-target", f"{arch}-linux-gnu.{GLIBC}"]


def _run(command: list[str]) -> str:
    # Zig's own cache stays inside the build folder: a home folder may be absent or read-only.
    env = os.environ | {"ZIG_GLOBAL_CACHE_DIR": str(BUILD / "zig"), "ZIG_LOCAL_CACHE_DIR": str(BUILD / "zig")}
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        said = (done.stderr or done.stdout).strip() or f"{command[:4]} ended with {done.returncode}"
        raise BuildError(said)
    return done.stderr


def _tenant_libraries(command: list[str]) -> list[str]:
    """Zig's stubs of what a tenant's library may need: libc and libdl.

    Left to itself zig names libpthread first, which before glibc 2.34 has open() and read() too: every
    program of a container would load it, and one without threads would start to lock.
    """
    wanted = ("libc.so.6", "libdl.so.2", "libc_nonshared.a")
    words = _run([*command, "--verbose", *SYSTEM]).split()
    found = {Path(word).name: word for word in words if Path(word).name in wanted}
    if len(found) != len(wanted):
        missing = ", ".join(sorted(set(wanted) - set(found)))
        raise BuildError(f"this ziglang links no {missing}: use 0.14 to 0.17")
    return ["-nostdlib", *(found[name] for name in wanted)]


def _digest(command: list[str], files: list[Path]) -> str:
    known = hashlib.sha256("\0".join([importlib.metadata.version("ziglang"), *command[1:]]).encode())
    for path in files:
        known.update(path.read_bytes() if path.is_file() else b"absent")
    return known.hexdigest()


def _name(path: Path) -> str:
    """A path as commands carry it, the same in every checkout."""
    return str(path.relative_to(ROOT))


def _included(depfile: Path) -> list[Path]:
    """The files a depfile (`object: source header...`) names, system headers left out by -MMD."""
    words = depfile.read_text().replace("\\\n", " ").split()[1:]
    return [ROOT / word for word in words]


def _compile(product: Product, source: Path) -> Path:
    obj = product.work / f"{source.parent.name}_{source.name}.o"
    depfile, stamp = obj.with_suffix(".d"), obj.with_suffix(".key")
    command = [*_zig(product.arch), *product.flags, "-c", _name(source), "-o", _name(obj)]
    if all(path.is_file() for path in (obj, stamp, depfile)) and (
        stamp.read_text() == _digest(command, _included(depfile))
    ):
        return obj
    obj.parent.mkdir(parents=True, exist_ok=True)
    stamp.unlink(missing_ok=True)
    _run([*command, "-MMD", "-MF", _name(depfile)])
    stamp.write_text(_digest(command, _included(depfile)))
    return obj


def _link(product: Product, objects: list[Path]) -> Path:
    result = product.work / Path(product.output).name
    stamp = product.work / "link.key"
    shape = ["-shared", f"-Wl,-soname,{product.soname}"] if product.soname else []
    if product.soname == "libvgpu.so":
        # The table means our own bodies, also where another preloaded library exports the same names.
        shape.append("-Wl,-Bsymbolic")
    command = [*_zig(product.arch), *shape, *LINK, *map(_name, objects), "-o", _name(result), *SYSTEM]
    key = _digest([*command, product.soname or ""], objects)
    if not (result.is_file() and stamp.is_file() and stamp.read_text() == key):
        stamp.unlink(missing_ok=True)
        if product.soname == "libvgpu.so":
            command = [*command[: -len(SYSTEM)], *_tenant_libraries(command[: -len(SYSTEM)])]
        _run(command)
        stamp.write_text(key)
    return result


def _place(built: Path, target: Path) -> None:
    """Put `built` at `target` by rename, unless it is there already."""
    if target.is_file() and target.read_bytes() == built.read_bytes():
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    fresh = target.with_name(f".{target.name}.{os.getpid()}")
    shutil.copyfile(built, fresh)
    fresh.chmod(0o755)
    fresh.replace(target)


@contextmanager
def build_lock() -> Iterator[None]:
    """One build at a time in a checkout, also between processes."""
    BUILD.mkdir(parents=True, exist_ok=True)
    with open(BUILD / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def build(package: Path, only: str = "") -> list[str]:
    """Build what zig builds into `package`; one product's errors do not keep the others from being built."""
    errors: list[str] = []
    try:
        listed = products(only)
    except BuildError as error:
        return [str(error)]
    with ThreadPoolExecutor(JOBS) as pool:
        for product in listed:
            pending = [pool.submit(_compile, product, source) for source in product.sources]
            failed = [str(job.exception()) for job in pending if job.exception()]
            if not failed:
                try:
                    _place(_link(product, [job.result() for job in pending]), package / product.output)
                except BuildError as error:
                    failed = [str(error)]
            errors += [f"{product.output}: {words}" for words in failed]
    return errors


def declarations() -> str:
    """The core headers as cffi reads them: only #include and #pragma lines are left out."""
    lines = [line for path in CDEF_HEADERS if path.is_file() for line in path.read_text().splitlines()]
    return "\n".join(line for line in lines if not re.match(r"\s*#\s*(include|pragma)\b", line))


def ffibuilder() -> FFI:
    """The cffi builder of isolator._core: API mode, so that C and Python cannot disagree on the layout."""
    ffi = FFI()
    ffi.cdef(declarations())
    ffi.set_source(
        "isolator._core",
        "\n".join(f'#include "{path.name}"' for path in CDEF_HEADERS if path.is_file()),
        sources=[_name(path) for path in CORE_SOURCES],
        depends=[_name(path) for path in [*_glob("core/*.h"), Path(__file__).resolve()]],
        include_dirs=["native/core"],
        define_macros=[("ISOLATOR_VERSION", f'"{version()}"'), ("Py_LIMITED_API", "0x030b0000")],
        py_limited_api=True,
        extra_compile_args=["-O2", "-std=gnu11", "-fvisibility=hidden"],
    )
    return ffi


if __name__ == "__main__":
    with build_lock():
        sys.exit("\n".join(build(ROOT / "isolator", *sys.argv[1:2])) or 0)
