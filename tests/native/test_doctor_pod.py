"""`isolator doctor` in, and on, containers with one thing broken: it names that thing, and nothing else."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import doctordoc
import pytest
from conftest import SimEnv
from container import why_not
from doctorroom import Room, Scene
from doctorscenes import SCENES

pytestmark = [
    pytest.mark.skipif(bool(why_not()), reason=why_not()),
    pytest.mark.root,
]


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
    assert seen.document["seconds"] <= 1.0 and seen.wall < 20, shown
    assert seen.error == "" or "ld.so" in seen.error
    table[name] = (scene.fault, ", ".join(f"`{one}`" for one in seen.ids), code, seen.document["seconds"])
