"""Compiles the clients of the loader tests, for any target, once for all test workers."""

from __future__ import annotations

import functools
import hashlib
import os
import subprocess
import sys
from pathlib import Path

from rootfs import locked

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "native"))

import cffi_build  # noqa: E402

CLIENTS = Path(__file__).resolve().parent / "clients"
KEPT = ROOT / "build" / "tests"
GLIBC = {"x86_64": "x86_64-linux-gnu.2.17", "aarch64": "aarch64-linux-gnu.2.17", "x86": "x86-linux-gnu.2.17"}


def _zig(output: Path, target: str, words: list[str]) -> None:
    cache = str(ROOT / "build" / "native" / "zig")
    env = os.environ | {"ZIG_GLOBAL_CACHE_DIR": cache, "ZIG_LOCAL_CACHE_DIR": cache}
    fresh = output.with_suffix(f".{os.getpid()}")
    command = [sys.executable, "-m", "ziglang", "cc", "-target", target, "-O1", *words, "-o", str(fresh)]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    fresh.replace(output)


def _kept(name: str, target: str, words: list[str], inputs: list[Path]) -> Path:
    """The result of one zig command, made again only when it or an input changed."""
    known = hashlib.sha256("\0".join([target, *words]).encode())
    for path in inputs:
        known.update(path.read_bytes())
    folder = KEPT / known.hexdigest()[:16]
    with locked(KEPT / f"{known.hexdigest()[:16]}.lock"):
        if not (folder / name).exists():
            folder.mkdir(exist_ok=True)
            _zig(folder / name, target, words)
    return folder / name


@functools.cache
def client(name: str, target: str = GLIBC["x86_64"], *flags: str, links: Path | None = None) -> Path:
    """The program made of `clients/<name>.c`; `links` is a library it is linked to."""
    source = CLIENTS / f"{name}.c"
    words = [*flags, str(source.relative_to(ROOT))]
    words += [str(links)] if links else []
    return _kept(name, target, [*words, "-ldl", "-lpthread"], [source])


def with_globals(name: str, target: str, names: list[str], where: str) -> Path:
    """The client with exported global variables of these names, which counts those that lost their value.

    `where` is "program", or "library": one of the program's, which comes after preloaded ones.
    """
    lines = [f"int {each} = 42;" for each in names]
    lines += ["int changed_globals(void)", "{", "    int changed = 0;"]
    lines += [f"    changed += {each} != 42;" for each in names]
    text = "\n".join([*lines, "    return changed;", "}", ""])
    extra = KEPT / f"globals-{hashlib.sha256(text.encode()).hexdigest()[:16]}.c"
    KEPT.mkdir(parents=True, exist_ok=True)
    extra.write_text(text)
    source = str(extra.relative_to(ROOT))
    if where == "program":
        return client(name, target, "-rdynamic", source)
    library = _kept(f"{extra.stem}.so", target, ["-shared", "-fPIC", source], [extra])
    return client(name, target, "-DOWN", links=library)


def musl_client(name: str, root: Path, output: Path) -> None:
    """The same program for musl, from the headers and objects of the root's musl-dev."""
    libraries = root / "usr/lib/x86_64-linux-musl"
    command = ["gcc", "-O1", "-nostdlib", "-nostdinc", "-isystem", root / "usr/include/x86_64-linux-musl"]
    command += ["-no-pie", "-fno-stack-protector", "-Wl,-dynamic-linker,/lib/ld-musl-x86_64.so.1"]
    command += [libraries / "crt1.o", libraries / "crti.o", CLIENTS / f"{name}.c", libraries / "crtn.o"]
    command += [f"-L{root / 'lib/x86_64-linux-musl'}", "-lc", "-o", output]
    subprocess.run(command, check=True, capture_output=True)


@functools.cache
def simulator(arch: str) -> Path:
    """The folder of a libcuda.so.1 of the simulated GPU for another architecture."""
    [product] = [p for p in cffi_build.products("sim/libcuda") if p.output == "sim/libcuda.so.1"]
    sources = [str(source.relative_to(ROOT)) for source in product.sources]
    words = [*product.flags, *sources, "-shared", f"-Wl,-soname,{product.soname}", "-s", *cffi_build.SYSTEM]
    headers = sorted(
        source for folder in {s.parent for s in product.sources} for source in folder.glob("*.[hd]*")
    )
    return _kept("libcuda.so.1", GLIBC[arch], words, [*product.sources, *headers]).parent
