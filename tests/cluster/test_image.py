"""The image that the Dockerfile makes, from a base made here: what is in it, and that it starts."""

from __future__ import annotations

import json
import subprocess
import tarfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import images
import pytest
from product import PASS

SITE = "opt/isolator/lib/python3.11/site-packages"
USER = "65532:65532"
ELF_MACHINE = {"x86_64": 62, "aarch64": 183}
Build = Callable[[], "tuple[Path, str]"]


@dataclass
class Image:
    """An image unpacked: its root, its configuration, its size."""

    root: Path
    config: dict[str, Any]
    layers: list[int] = field(default_factory=list)

    def run(self, command: Sequence[str], user: str = USER, **env: str) -> subprocess.CompletedProcess[str]:
        """A finished command in the root, as containerd would start it but for cgroups and devices."""
        pairs = [*self.config["config"]["Env"], *(f"{key}={value}" for key, value in env.items())]
        mounts = (
            'mount -t proc proc "$1/proc" && mount --bind /dev "$1/dev" && mount -t tmpfs shm "$1/dev/shm"'
        )
        setup = f'{mounts} && exec chroot --userspec="$2" "$1" "${{@:3}}"'
        spaces = ["unshare", "--mount", "--pid", "--fork", "--net", "--ipc"]
        words = [
            *spaces,
            "bash",
            "-c",
            setup,
            "run",
            str(self.root),
            user,
            "/usr/bin/env",
            "-i",
            *pairs,
            *command,
        ]
        return subprocess.run(words, capture_output=True, text=True, timeout=60)


def unpacked(build: Build, folder: Path) -> Image:
    """The image's layers one over the other; skips where images cannot be built."""
    try:
        archive, name = build()
    except images.Unavailable as error:
        pytest.skip(str(error))
    root = folder / "root"
    with tarfile.open(archive) as outer:
        (manifest,) = json.load(outer.extractfile("manifest.json") or pytest.fail("no manifest"))
        assert manifest["RepoTags"] == [name]
        config = json.load(outer.extractfile(manifest["Config"]) or pytest.fail("no configuration"))
        image = Image(root, config)
        for layer in manifest["Layers"]:
            raw = outer.extractfile(layer)
            assert raw is not None
            image.layers.append(outer.getmember(layer).size)
            with tarfile.open(fileobj=raw) as inner:
                inner.extractall(root, filter="fully_trusted")
    root.chmod(0o755)
    return image


@pytest.fixture(scope="module")
def isolator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Image]:
    """Our image."""
    yield unpacked(images.build_isolator_image, tmp_path_factory.mktemp("isolator"))


@pytest.fixture(scope="module")
def tenant(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Image]:
    """The tenants' image."""
    yield unpacked(images.build_tenant_image, tmp_path_factory.mktemp("tenant"))


pytestmark = pytest.mark.timeout(1500)


def test_image_states_version_user_and_entry_point(isolator: Image) -> None:
    """Non-root by default; the version is in the label and is what the command says."""
    config = isolator.config["config"]
    assert config["User"] == USER
    assert config["Entrypoint"] == ["isolator"]
    assert config["Labels"]["org.opencontainers.image.version"] == images.version()
    done = isolator.run(["/opt/isolator/bin/isolator", "--version"])
    assert (done.returncode, done.stdout.strip()) == (0, images.version()), done.stderr


@pytest.mark.parametrize("arch", ["x86_64", "aarch64"])
def test_library_of_both_architectures_is_inside(isolator: Image, arch: str) -> None:
    """libsync finds an ELF file of each machine, arm64 too (B153), readable by anyone."""
    done = isolator.run(["/opt/isolator/bin/isolator", "libpath", "--arch", arch])
    assert done.returncode == 0, done.stderr
    library = isolator.root / done.stdout.strip().lstrip("/")
    assert int.from_bytes(library.read_bytes()[18:20], "little") == ELF_MACHINE[arch]
    assert library.stat().st_mode & 0o444 == 0o444


def test_simulator_and_build_tools_are_left_out(isolator: Image) -> None:
    """Nothing of the simulated GPU, of pip or of the compiler comes along."""
    places = [str(path.relative_to(isolator.root)) for path in isolator.root.rglob("*")]
    unwanted = (
        "isolator/sim/",
        "libcuda.so",
        "libnvidia-ml.so",
        "nvidia-smi",
        "ziglang",
        f"{SITE}/pip",
        "bin/gcc",
    )
    assert [place for place in places if any(word in place for word in unwanted)] == []
    assert any(place.startswith(f"{SITE}/isolator/_core") for place in places)


@pytest.mark.parametrize("module", ["isolator.region", "kubernetes.client", "uvicorn", "fastapi", "pynvml"])
def test_libraries_of_the_workloads_can_be_imported(isolator: Image, module: str) -> None:
    """The extension and the libraries load as the image's user, from what was compiled at build time."""
    python = "/opt/isolator/bin/python"
    code = f"import sys, {module} as m; print(m.__cached__); sys.exit(not m.__loader__)"
    done = isolator.run([python, "-v", "-c", code])
    assert done.returncode == 0, done.stderr[-2000:]
    compiled = isolator.root / done.stdout.strip().splitlines()[-1].lstrip("/")
    assert compiled.is_file()
    # Bit 0 of the second word: not checked by time, which a builder may change; bit 1: checked by hash.
    assert int.from_bytes(compiled.read_bytes()[4:8], "little") == 1


def test_libsync_shows_its_help(isolator: Image) -> None:
    """The installer starts on the standard library alone, as root too."""
    for user in (USER, "0:0"):
        done = isolator.run(["/opt/isolator/bin/isolator", "libsync", "--help"], user)
        assert done.returncode == 0, done.stderr
        assert "--mount" in done.stdout


def test_own_code_is_a_small_layer(isolator: Image) -> None:
    """An upgrade moves our code alone: the last layer is small, the libraries' layer stays the same."""
    assert len(isolator.layers) == 3
    assert isolator.layers[-1] < 4 << 20
    assert isolator.layers[-2] < 140 << 20


def test_tenant_shows_the_simulated_card(tenant: Image) -> None:
    """nvidia-smi of the tenants' image sees one T4, as any user."""
    done = tenant.run(["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader"], "1000:1000")
    assert done.stdout.strip() == "Tesla T4, 15360 MiB", done.stderr


@pytest.mark.parametrize("program", ["memory-limit", "memory-limit-static"])
def test_tenant_without_the_library_is_not_held(tenant: Image, program: str) -> None:
    """On a bare card the second allocation is granted, and the program says so by its status."""
    done = tenant.run([program], "1000:1000")
    assert "allocate 3 GiB: no error\nallocate another 2 GiB: no error\n" in done.stdout, done.stderr
    assert done.returncode == 3


def test_tenant_with_the_library_is_refused(tenant: Image, libvgpu: Path, tmp_path: Path) -> None:
    """With the library and a quota the lab's program passes; the static one escapes, as documented."""
    place = tenant.root / "libvgpu.so"
    place.write_bytes(libvgpu.read_bytes())
    place.chmod(0o755)
    env = {
        "LD_PRELOAD": "/libvgpu.so",
        "CUDA_DEVICE_MEMORY_LIMIT": "4147m",
        "CUDA_DEVICE_MEMORY_SHARED_CACHE": "/tmp/usage.cache",
    }
    done = tenant.run(["memory-limit"], "1000:1000", **env)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "allocate another 2 GiB: out of memory" in done.stdout
    assert PASS in done.stdout
    assert tenant.run(["memory-limit-static"], "1000:1000", **env).returncode == 3


def test_tenant_finds_the_driver_without_its_environment(tenant: Image) -> None:
    """`env -i` loses LD_LIBRARY_PATH; the loader's cache still names the driver."""
    done = tenant.run(["/usr/bin/env", "-i", "/usr/local/bin/memory-limit", "64"])
    assert "allocate 64 MiB: no error" in done.stdout, done.stderr


def test_image_script_passes_what_was_given(tmp_path: Path) -> None:
    """The tool gets name, version, base and mirror; the mirror, which may hold a password, by name alone."""
    tool = tmp_path / "tool"
    tool.write_text('#!/bin/sh\n[ "$1" = build ] && printf "%s\\n" "$@" && echo "index=$PIP_INDEX_URL"\n')
    tool.chmod(0o755)
    given = {
        "CONTAINER_TOOL": str(tool),
        "IMAGE": "r.example/x:1",
        "BASE": "debian-python",
        "PATH": "/usr/bin:/bin",
    }
    env = given | {"PIP_INDEX_URL": "https://user:secret@mirror.example/simple"}
    done = subprocess.run([images.ROOT / ".ci/image"], env=env, capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr
    *words, index, hint = done.stdout.splitlines()
    assert {f"VERSION={images.version()}", "BASE", "PIP_INDEX_URL", "r.example/x:1"} <= set(words)
    assert not any("secret" in word for word in words) and index.endswith("mirror.example/simple")
    assert hint.endswith("push r.example/x:1")


def test_image_script_says_what_is_missing(tmp_path: Path) -> None:
    """Without a container tool one line says what to install."""
    for name in ("bash", "dirname", "sed"):
        (tmp_path / name).symlink_to(f"/usr/bin/{name}")
    env = {"PATH": str(tmp_path)}
    done = subprocess.run(["/bin/bash", images.ROOT / ".ci/image"], env=env, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.splitlines() == [
        "image: no docker, podman or buildah works here: install one, or name it in CONTAINER_TOOL"
    ]
