"""What `isolator top` draws: rows by pressure, in any width, and nothing that steers a terminal."""

from __future__ import annotations

import dataclasses
import io
import os
import re
from pathlib import Path

import pytest
import status_node as node
from region_files import MIB
from rich.console import Console

from isolator.monitor import document, status, view, words
from isolator.monitor.document import Device, Document, Node, Tenant, TenantDevice
from isolator.top.table import draw

PICTURE = Path(__file__).resolve().parents[2] / "docs" / "pictures" / "top.svg"


def text(shown: Document, width: int = 140, height: int | None = None) -> list[str]:
    """The lines, without colours."""
    console = Console(width=width, file=io.StringIO(), highlight=False)
    console.print(draw(shown, width, height))
    told = console.file.getvalue()  # type: ignore[attr-defined]
    return [line.rstrip() for line in told.splitlines()]


def tenant(name: str, used: int | None = 0, limit: int | None = 4147, **more: object) -> Tenant:
    device = TenantDevice(
        0,
        "GPU-0",
        None if used is None else used * MIB,
        None if limit is None else limit * MIB,
        **{key: more.pop(key) for key in ("peak", "refused", "refused_last") if key in more},  # type: ignore[arg-type]
    )
    given = {"state": "enforced", "processes": 1, "devices": (device,)} | more
    return Tenant("team", name, "uid", "main", **given)  # type: ignore[arg-type]


def page(*tenants: Tenant, devices: tuple[Device, ...] = ()) -> Document:
    return Document(Node("n1", 1_800_000_000.0, "1.2.0"), devices, tenants)


@pytest.fixture
def busy(tmp_path: Path) -> Document:
    with node.busy(tmp_path) as snapshot:
        return status.document(view.make(snapshot, {}))


def test_every_figure_of_a_tenant_is_in_its_line() -> None:
    """Name, device, use and limit, bar, percent, peak, refusals with their age, processes, state."""
    now = 1_800_000_000.0
    lines = text(page(tenant("a", 4000, peak=4100 * MIB, refused=17, refused_last=now - 90, processes=3)))
    (line,) = [line for line in lines if "team/a/main" in line]
    found = re.sub(r"[━╸]+", "#", line)
    assert re.sub(r"\s+", " ", found) == "team/a/main 0 4000 / 4147 # 96 4100 17 (1 min ago) 3 enforced"
    assert line.count("━") in (11, 12)


def test_order_is_by_pressure() -> None:
    """Without a limit first, then by the part of the limit, then what has no figure."""
    shown = page(
        tenant("half", 50, 100),
        tenant("full", 100, 100),
        tenant("big", 400, 1000),
        tenant("none", 1, 0),
        tenant("unknown", None),
        tenant("stray", state="uncapped", uncapped="not_injected", devices=(), reason="nobody saw it"),
        tenant("fresh", state="idle", devices=(), processes=None, expected_limit=70 * MIB),
    )
    lines = text(shown)
    order = [found[1] for line in lines if (found := re.match(r"team/(\w+)/main", line))]
    assert order == ["none", "stray", "full", "half", "big", "fresh", "unknown"]
    assert any(re.search(r"stray.* - / none .*uncapped: not_injected +nobody saw it", line) for line in lines)
    assert any(re.search(r"fresh/main +- +- / 70 ", line) for line in lines)
    assert any(re.search(r"none/main +0 +1 / none ", line) for line in lines)


def test_devices_show_ledger_beside_nvml(busy: Document) -> None:
    """NVML's use and total, what is charged, the sum of the limits."""
    lines = text(busy)
    (line,) = [line for line in lines if line.startswith("0 Tesla T4")]
    assert re.sub(r"\W+", " ", line) == "0 Tesla T4 9800 15360 7200 24780 87 66 C 68W"


@pytest.mark.parametrize("width", [20, 40, 60, 80, 100, 140, 250])
def test_any_width_keeps_names_use_and_state(busy: Document, width: int) -> None:
    """No line is longer than the terminal; name, use, limit and state stay readable at each."""
    lines = text(busy, width)
    assert max(map(len, lines)) <= width
    joined = re.sub(r"\s", "", "".join(lines))
    for want in ("TENANT", "STATE", "enforced") if width >= 40 else ():
        assert want in joined
    if width >= 60:
        assert "4100 / 4147" in "\n".join(lines)
    if width >= 80:
        assert all("REFUSED" in line or "%" in line for line in lines if line.startswith("TENANT"))
    if width >= 140:
        (head,) = [line for line in lines if line.startswith("TENANT")]
        assert re.split(r"\s{2,}", head) == [
            *("TENANT", "GPU", "USED / LIMIT MiB", "%", "PEAK", "REFUSED", "PROC", "STATE")
        ]


def test_a_screen_shows_what_fits_and_counts_the_rest() -> None:
    """One line a tenant on a screen of 24 lines, and how many there are besides."""
    many = page(*(tenant(f"pod-{n:03d}", n, 1000) for n in range(200)))
    lines = text(many, 100, 24)
    assert len(lines) <= 24
    shown = [line for line in lines if "team/pod-" in line]
    assert "pod-199" in shown[0]
    assert lines[-1] == f"... and {200 - len(shown)} more below"
    assert len(text(many, 100)) > 200


def test_an_empty_node_and_an_unknown_one_say_so() -> None:
    """Words in the place of an empty table."""
    assert text(page())[-1] == "no tenant on this node"


def test_hostile_text_steers_nothing() -> None:
    """Escape codes, bells, markup and line feeds of any field come out as plain characters."""
    evil = "\x1b]0;x\x07[red]a\nb\u202e"
    odd = dataclasses.replace(
        tenant("p"), pod=evil, container=evil, state="unsettled", reason=evil, uncapped=evil
    )
    shown = page(odd, devices=(Device(0, evil, evil),))
    shown = dataclasses.replace(shown, node=Node(evil, 1.0, evil, document.Library(evil), problems=(evil,)))
    told = "\n".join(text(shown, 250))
    assert "[red]" in told
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f\u202e]", told)


@pytest.mark.parametrize(
    ("seconds", "said"), [(-5, "0 s"), (59.6, "60 s"), (60, "1 min"), (7200, "2 h"), (200_000, "2 d")]
)
def test_ages_are_in_their_largest_unit(seconds: float, said: str) -> None:
    """Whole units, never negative."""
    assert words.age(seconds) == said


@pytest.mark.parametrize(("part", "said"), [(None, "-"), (0.999, "99 %"), (1.0, "100 %"), (1.5, "150 %")])
def test_hundred_percent_is_all_of_it(part: float | None, said: str) -> None:
    """Nearly full is not shown as full."""
    assert words.percent(part) == said


def test_picture_of_the_docs(busy: Document) -> None:
    """The SVG in docs/ is drawn from real regions and has the words of today's table."""
    console = Console(record=True, width=150, file=io.StringIO(), highlight=False, force_terminal=True)
    console.print(draw(busy, 150))
    made = console.export_svg(title="isolator top", unique_id="top")
    made = re.sub(r"@font-face \{.*?\}\n", "", made, flags=re.S)  # nothing from elsewhere
    assert "url(http" not in made
    if os.environ.get("UPDATE_PICTURES"):
        PICTURE.parent.mkdir(exist_ok=True)
        PICTURE.write_text(made)

    def seen(svg: str) -> set[str]:
        return set(re.findall(r">([^<>\n]+)</text>", svg))

    now = re.compile(r"\d{4}-\d\d-\d\d|ago")
    assert {each for each in seen(made) if not now.search(each)} <= seen(PICTURE.read_text())
