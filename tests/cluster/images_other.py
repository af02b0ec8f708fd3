"""Another release's image: ours with one more layer, which has another version and another library."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from pathlib import Path

from isolator.libpath import architecture

_PACKAGE = "site-packages/isolator/"


def make(archive: Path, target: Path, tag: str, version: str, library: bytes) -> str:
    """Writes the archive `target`, made of the docker archive of our image; answers the image's full name."""
    with tarfile.open(archive) as old:
        (manifest,) = json.loads(_read(old, "manifest.json"))
        config = json.loads(_read(old, manifest["Config"]))
        layer = _layer(_package(old, manifest["Layers"]), version, library)
        digest = hashlib.sha256(layer).hexdigest()
        config["rootfs"]["diff_ids"].append(f"sha256:{digest}")
        config["history"].append({"created": "1970-01-01T00:00:00Z", "created_by": "tests"})
        described = json.dumps(config).encode()
        name = f"{manifest['RepoTags'][0].rpartition(':')[0]}:{tag}"
        layers = [*manifest["Layers"], f"{digest}.tar"]
        changed = {
            "Config": f"{hashlib.sha256(described).hexdigest()}.json",
            "RepoTags": [name],
            "Layers": layers,
        }
        with tarfile.open(target, "w") as new:
            for member in old:
                if member.name not in ("manifest.json", "repositories", manifest["Config"]):
                    new.addfile(member, old.extractfile(member) if member.isreg() else None)
            _add(new, f"{digest}.tar", layer)
            _add(new, str(changed["Config"]), described)
            _add(new, "manifest.json", json.dumps([changed]).encode())
    return name


def _read(tar: tarfile.TarFile, name: str) -> bytes:
    file = tar.extractfile(name)
    assert file
    return file.read()


def _add(tar: tarfile.TarFile, name: str, data: bytes, mode: int = 0o644) -> None:
    member = tarfile.TarInfo(name)
    member.size, member.mode = len(data), mode
    tar.addfile(member, io.BytesIO(data))


def _package(archive: tarfile.TarFile, layers: list[str]) -> str:
    """Folder of the package in the image."""
    for layer in reversed(layers):
        with tarfile.open(fileobj=archive.extractfile(layer)) as files:
            for name in files.getnames():
                if name.endswith(f"{_PACKAGE}__init__.py"):
                    return name.removesuffix("__init__.py")
    raise AssertionError("the image has no package isolator")


def _layer(package: str, version: str, library: bytes) -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as tar:
        _add(tar, f"{package}__init__.py", f'__version__ = "{version}"\n'.encode())
        # Compiled by hash: the old one would still be taken.
        _add(tar, f"{package}__pycache__/.wh.__init__.cpython-311.pyc", b"")
        _add(tar, f"{package}lib/{architecture()}/libvgpu.so", library, 0o755)
    return made.getvalue()
