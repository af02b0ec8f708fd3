"""Our image, from the Dockerfile that a user builds, and the tenants' image.

    archive, name = build_isolator_image()      # `ctr -n k8s.io image import ARCHIVE`, then use NAME
    python tests/cluster/images.py              # builds both ahead of the tests; a first build takes minutes

The bases are Debian roots unpacked from the mirror that apt uses already; wheels come once from pip's index.
An unchanged image is not built again, a change of Python code alone takes seconds.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

from images_base import ROOT, BuildError, Unavailable, build, run, wheels, why_not

from isolator.libpath import simulator

sys.path.insert(0, str(ROOT / "native"))

import cffi_build

__all__ = ["BuildError", "Unavailable", "build_isolator_image", "build_tenant_image", "version", "why_not"]

TENANT = Path(__file__).resolve().parent / "tenant"
PROGRAM = TENANT / "memory_limit.c"
OURS = (
    *("Dockerfile", ".dockerignore", "LICENSE", "README.md", "pyproject.toml", "setup.py"),
    *("isolator", "native"),
)
"""What of the checkout our image is made from."""


def _sources(*places: str) -> list[Path]:
    """The files under `places` of the checkout that an image is made from."""
    found: list[Path] = []
    for place in places:
        path = ROOT / place
        found += [path] if path.is_file() else [p for p in sorted(path.rglob("*")) if p.is_file()]
    unwanted = ("__pycache__", "isolator/lib/", "isolator/sim/", "isolator/_core", "native/simgpu/")
    return [path for path in found if not any(word in str(path.relative_to(ROOT)) for word in unwanted)]


def build_isolator_image() -> tuple[Path, str]:
    """Archive and full name of our image, built from the checkout's Dockerfile. Raises Unavailable."""
    sources = {str(path.relative_to(ROOT)): path for path in _sources(*OURS)}
    arguments = {"PIP_NO_INDEX": "1", "VERSION": version()}

    def prepare(context: Path) -> None:
        # Hard links: the wheels are large, and the builder refuses links that leave the context.
        shutil.copytree(wheels(), context / "wheels", copy_function=os.link)

    return build("images.example.com/local/kai-resource-isolator", sources, arguments, prepare)


def version() -> str:
    """The version that the image's label must state."""
    return cffi_build.version()


def build_tenant_image() -> tuple[Path, str]:
    """Archive and full name of the tenants' image: Python, the simulated GPU, the lab's program."""
    places = [TENANT / "Dockerfile"]
    places += [simulator() / name for name in ("libcuda.so.1", "libnvidia-ml.so.1", "nvidia-smi")]
    keys = [PROGRAM.read_bytes(), Path(__file__).read_bytes()]
    sources = {path.name: path for path in places}
    return build("images.example.com/local/tenant", sources, {}, _compile, keys)


def _compile(context: Path) -> None:
    """The lab's program twice: for the driver found at run time, and static with the simulator linked in."""
    target = f"{os.uname().machine}-linux-gnu.{cffi_build.GLIBC}"
    zig = [sys.executable, "-m", "ziglang", "cc", "-target", target, "-O2", "-Wall", "-Werror"]
    run([*zig, PROGRAM, "-ldl", "-o", context / "memory-limit"], BuildError)
    headers, _ = cffi_build.vendor_include()
    include = [f"-I{ROOT / 'native' / part}" for part in ("core", "shim", "simgpu")]
    stated = ["-DLINKED", '-DISOLATOR_VERSION="test"', '-DSIM_HEADERS="test"']
    gcc = ["gcc", "-static", "-O1", "-std=gnu11", "-w", *stated, *include, "-isystem", headers]
    run([*gcc, PROGRAM, *cffi_build.SIM_SOURCES["cuda"], "-o", context / "memory-limit-static"], BuildError)


def main() -> int:
    """Builds both images and shows their names."""
    for make in (build_isolator_image, build_tenant_image):
        try:
            archive, name = make()
        except (BuildError, Unavailable) as error:
            print(f"images: {error}", file=sys.stderr)
            return 1
        print(name, archive)
    return 0


if __name__ == "__main__":
    sys.exit(main())
