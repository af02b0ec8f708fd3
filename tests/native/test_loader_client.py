"""CUDA programs on old, current, new and foreign systems: each is held to its quota by the preload file."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import rootfs
from loaderbuild import GLIBC, client, simulator

pytestmark = pytest.mark.root

LAB = "init context total alloc:3072 alloc:2048 free alloc:2048 total".split()
HELD = "init 0,context 0,total 0 4147,alloc 3072 0,alloc 2048 2,free 0,alloc 2048 0,total 0 4147".split(",")
FREE = "init 0,context 0,total 0 15095,alloc 3072 0,alloc 2048 0,free 0,alloc 2048 0,total 0 15095".split(",")


class Tenant:
    """A CUDA program in a root file system, on a simulated GPU of this test."""

    def __init__(self, name: str, host: Path, sim: Path, scratch: Path) -> None:
        self.name, self.scratch = name, scratch
        self.machine = rootfs.MACHINES[rootfs.SUITES[name].arch]
        rootfs.get(name)
        self.library = host.parents[1] / self.machine / "libvgpu.so"
        assert self.library.exists(), f"{self.library} is missing: make build"
        self.sim = sim if self.machine == "x86_64" else simulator(self.machine)
        self.folder = scratch / "test"
        self.folder.mkdir(mode=0o777)
        self.folder.chmod(0o777)

    def run(
        self, verbs: list[str], preload: bool = True, linked: bool = False, driver: bool = True, **env: str
    ) -> tuple[list[str], str, int]:
        """Lines, standard error and status of one run."""
        flags = ("-DLINKED",) if linked else ()
        links = self.sim / "libcuda.so.1" if linked else None
        shutil.copy(client("loader_client", GLIBC[self.machine], *flags, links=links), self.folder / "client")
        given = {
            "LD_LIBRARY_PATH": "/sim",
            "SIMGPU_STATE": "/test/simgpu.state",
            "CUDA_DEVICE_MEMORY_SHARED_CACHE": "/test/usage.cache",
            "CUDA_DEVICE_MEMORY_LIMIT": "4147m",
            **env,
        }
        binds = [(self.library, rootfs.LIBRARY), (self.folder, "/test")]
        binds += [(self.sim, "/sim")] if driver else []
        words = rootfs.command(
            self.name,
            ["/test/client", *verbs],
            preload=rootfs.LIBRARY if preload else "",
            binds=binds,
            env=given,
            scratch=self.scratch,
        )
        done = rootfs.run(words)
        return done.stdout.splitlines(), done.stderr, done.returncode


@pytest.fixture(params=[*rootfs.NATIVE, "bookworm-arm64"])
def tenant(request: pytest.FixtureRequest, libvgpu: Path, sim_dir: Path, tmp_path: Path) -> Tenant:
    """A program in each of the root file systems."""
    return Tenant(request.param, libvgpu, sim_dir, tmp_path)


def test_the_quota_holds_for_looked_up_functions(tenant: Tenant) -> None:
    """3 GiB fit, 2 GiB more do not, and do after a free; without the library they fit (B011, B151, B153)."""
    assert tenant.run(LAB, preload=False) == (FREE, "", 0)
    for how in ("dlsym", "proc"):
        assert tenant.run(LAB, CLIENT_FIND=how) == (HELD, "", 0), how


def test_the_quota_holds_for_linked_programs(tenant: Tenant) -> None:
    """The same for a program that is linked to the driver (B011)."""
    assert tenant.run(LAB, preload=False, linked=True) == (FREE, "", 0)
    assert tenant.run(LAB, linked=True) == (HELD, "", 0)


def test_children_share_the_quota(tenant: Tenant) -> None:
    """A forked child that starts CUDA itself finds what its parent holds charged."""
    done = tenant.run(["fork", "init", "context", "alloc:3072", "alloc:2048"])
    assert done == (["init 0", "context 0", "alloc 3072 0", "alloc 2048 2"], "", 0)


def test_without_a_driver_the_program_says_so_itself(tenant: Tenant) -> None:
    """Where no driver is installed a CUDA program gets the loader's own answer, no word of ours (B177)."""
    assert tenant.run(LAB, driver=False) == (["no driver"], "", 1)
