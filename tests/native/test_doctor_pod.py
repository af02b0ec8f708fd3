"""`isolator doctor` in, and on, containers with one thing broken: it names that thing, and nothing else."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import doctordoc
import pytest
from conftest import SimEnv
from container import why_not
from doctorroom import WAIT, Room, Scene
from doctorscenes import SCENES

pytestmark = [
    pytest.mark.skipif(bool(why_not()), reason=why_not()),
    pytest.mark.root,
]


# As root without the right to look into others: what a restricted debug container is.
UNPRIVILEGED = "setpriv --bounding-set=-sys_ptrace --inh-caps=-sys_ptrace"
QUICK = ("--patience", "0.8")
HANGING = """
mkdir $W/hang
gcc -shared -fPIC -x c -o $W/hang/libnvidia-ml.so.1 - <<'END'
#include <unistd.h>
int nvmlInitWithFlags(unsigned flags) { return (int)sleep(flags + 30); }
END
"""


@pytest.fixture(scope="module")
def table() -> Iterator[dict[str, doctordoc.Row]]:
    """Rows of the documentation, written at the end where that is asked for."""
    rows: dict[str, doctordoc.Row] = {}
    yield rows
    if doctordoc.WANTED and len(rows) == len(SCENES):
        doctordoc.put("pods", doctordoc.rows([rows[name] for name in SCENES]))


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that other users get to, unlike pytest's."""
    with tempfile.TemporaryDirectory(prefix="doctor-") as made:
        yield Path(made)


@pytest.mark.timeout(400)  # the first static program waits for a C library that is built for it
@pytest.mark.parametrize("name", SCENES)
def test_the_doctor_names_what_is_wrong_with_a_container(
    name: str, open_folder: Path, libvgpu: Path, sim_env: SimEnv, table: dict[str, doctordoc.Row]
) -> None:
    """Each broken set-up ends in its cause's exit status within a second, each sound one in silence."""
    from isolator.doctor import causes

    scene: Scene = SCENES[name]() if callable(SCENES[name]) else SCENES[name]
    seen = Room(open_folder, libvgpu, sim_env(), scene).look()
    shown = f"{seen.document}\n{seen.error}"
    wanted = [scene.expect] if scene.expect else []
    assert seen.ids[:1] == wanted, shown
    assert set(seen.ids) == set(wanted) | scene.also, shown
    code = causes.get(scene.expect).code if scene.expect and not scene.notice else 0
    assert (seen.status, seen.document["exit_status"]) == (code, code), shown
    assert seen.document["healthy"] is (code == 0)
    assert all(finding["fix"] and "\n" not in finding["detail"] for finding in seen.document["findings"])
    assert seen.document["cpu_seconds"] <= 0.5 and seen.wall < 20, shown
    assert seen.error == "" or "ld.so" in seen.error
    table[name] = (scene.fault, ", ".join(f"`{one}`" for one in seen.ids), code, seen.document["seconds"])


def test_a_driver_that_hangs_is_said_and_not_waited_for(
    open_folder: Path, libvgpu: Path, sim_env: SimEnv
) -> None:
    """NVML that does not come back costs one check of the report, and no more than a second."""
    env = sim_env()
    path = {"LD_LIBRARY_PATH": f"$W/hang:{env['LD_LIBRARY_PATH']}"}
    scene = Scene("", program=(*WAIT,), where="outside", before=HANGING, env=path, arguments=QUICK)
    seen = Room(open_folder, libvgpu, env, scene).look()
    assert (seen.status, seen.ids) == (0, []), seen
    (late,) = [entry["why"] for entry in seen.document["unchecked"] if "NVML" in entry["what"]]
    assert "does not answer" in late
    assert 0.4 < seen.document["seconds"] <= 5 and seen.document["cpu_seconds"] <= 0.5


@pytest.mark.parametrize("where", ["program", "debug"])
def test_without_the_rights_nothing_is_called_healthy(
    where: str, open_folder: Path, libvgpu: Path, sim_env: SimEnv
) -> None:
    """Where the container may not be looked at, the status is 1 and the line says what right is missing."""
    scene = Scene("", program=(*WAIT,), where=where, rights=UNPRIVILEGED)
    seen = Room(open_folder, libvgpu, sim_env(), scene).look()
    assert (seen.status, seen.document["healthy"], seen.ids) == (1, False, []), seen
    assert "run as root (kubectl debug: docs/doctor.md)" in seen.document["unchecked"][0]["why"]
