"""The status page: what its HTML says, what it may load, and how a real browser shows it."""

from __future__ import annotations

import base64
import hashlib
import html
import os
import re
import struct
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from html.parser import HTMLParser
from pathlib import Path

import chromium
import httpx
import pytest
import status_node as node
from region_files import MIB, Spec

from isolator.monitor import document, page, status, view
from isolator.monitor.model import Snapshot
from isolator.monitor.shared import SharedScan

PICTURES = Path(__file__).resolve().parents[2] / "docs" / "pictures"
VOID = {"meta", "br"}
PLAIN = "html head title style body h1 h2 p a div strong ul li table thead tbody tr th td small span dl dt dd"
KNOWN = {*VOID, *PLAIN.split(), "svg", "rect", "path", "footer"}


class _Checker(HTMLParser):
    """Elements and attributes, and whether each element is closed where it should be."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: set[str] = set()
        self.attributes: list[tuple[str, str]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.add(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, tag


def made(snapshot: Snapshot) -> str:
    return page.render(status.document(view.make(snapshot, {})))


def checked(text: str) -> _Checker:
    """The page's elements: plain ones alone, all closed, nothing that runs or comes from elsewhere."""
    found = _Checker()
    found.feed(text)
    assert found.open == []
    assert found.elements <= KNOWN
    for name, value in found.attributes:
        assert not name.startswith("on") and name not in ("style", "src", "srcset"), name
        assert name != "href" or value in ("?", "?refresh=5", "status.json", "metrics"), value
    return found


def words(text: str) -> str:
    """What a reader sees, in one line."""
    body = re.sub(r"<style>.*?</style>", "", text, flags=re.S)
    return " ".join(html.unescape(re.sub(r"<[^>]+>", " ", body)).split())


def test_page_says_what_the_document_says(tmp_path: Path) -> None:
    """Devices, tenants by pressure, refusals, states in words, the node's health."""
    with node.busy(tmp_path) as snapshot:
        text = made(snapshot)
    checked(text)
    said = words(text)
    assert "gpu-node-1" in said and "4 problems" in said
    assert "0 Tesla T4 GPU-864f41ea" in said and "9800 MiB / 15360 MiB (63 %)" in said
    assert "4100 MiB / 4147 MiB (98 %)" in said and re.search(r"17 \(4\d s ago\) asked for 2048 MiB", said)
    assert "uncapped: not_injected the webhook did not see the pod" in said
    assert "enforced, limit above KAI's grant, tampered" in said
    order = [name for name in re.findall(r"<tr><td><strong>([\w-]+)", text)]
    assert order[:2] == ["stray", "llm-serving-7d9f8b6c5d-x2x4q"] and order[-1] in ("notebook", "waiting")
    assert "Library ready version 1.2.0 checked 1" in said


def test_bars_are_as_long_as_what_is_used(tmp_path: Path) -> None:
    """76.5 % of the limit, marked at the peak, and never more than all of it."""
    with node.healthy(tmp_path) as snapshot:
        text = made(snapshot)
    assert '<rect width="76.5" height="1"/><path vector-effect="non-scaling-stroke" d="M79.6 0v1"/>' in text
    over = Spec(slots=[node.slot(5000)])
    with node.put(tmp_path, 1, over):
        text = made(node.compose(tmp_path, node.Pods(node.pod(1))))
    assert '<svg class="bar near"' in text and '<rect width="100" height="1"/>' in text
    assert "5000 MiB / 4147 MiB (121 %)" in words(text)


def test_an_empty_node_says_so(tmp_path: Path) -> None:
    """No empty table: words."""
    node.report(tmp_path)
    text = made(node.compose(tmp_path, node.Pods(), node.Cards()))
    checked(text)
    assert (
        "No problem found." in text
        and "No tenant runs on this node." in text
        and "No device is known." in text
    )


def test_hostile_text_stays_text(tmp_path: Path) -> None:
    """Label, reasons, names: nothing of the cluster's or a tenant's text becomes an element."""
    evil = "\"'><script>alert(1)</script><img src=x onerror=alert(1)>"
    node.report(tmp_path, ready=False, problem=evil, library_version=evil)
    out = {"gpu-memory": "1", "kai-resource-isolator.io/status": f"skipped: {evil}"}
    pods = [node.pod(1, injected=False, annotations=out), node.pod(2, name=evil, namespace=evil)]
    with node.put(tmp_path, 2, Spec()):
        text = made(node.compose(tmp_path, node.Pods(*pods, label=evil)))
    checked(text)
    assert html.escape(evil, quote=False).replace('"', "&#34;").replace("'", "&#39;") in text


def test_thousand_tenants_are_below_a_megabyte(tmp_path: Path) -> None:
    """The page of a node with 1,000 tenants is one a phone can load."""
    device = document.TenantDevice(0, "GPU-x", 3174 * MIB, 4147 * MIB, 3300 * MIB, 17, 1e9, 2048 * MIB)
    name = "a-deployment-with-a-long-name-7d9f8b6c5d-"
    tenants = tuple(
        document.Tenant(
            "team",
            f"{name}{n:05d}",
            "0" * 36,
            "main",
            "unsettled",
            None,
            "NVML does not list",
            devices=(device,),
        )
        for n in range(1000)
    )
    text = page.render(document.Document(document.Node("n", 2e9, "1"), (), tenants))
    assert len(text.encode()) < 1_000_000
    assert text.count("<tr>") > 1000


def test_http_gives_page_and_json_of_one_scan_with_strict_headers(tmp_path: Path) -> None:
    """No script, no resource: the policy allows the one style sheet by its hash, which fits."""
    with (
        node.healthy(tmp_path) as snapshot,
        node.serve(lambda: snapshot) as url,
        httpx.Client(base_url=url, trust_env=False) as client,
    ):
        answer = client.get("/")
        told = client.get("/status.json")
        assert client.get("/?refresh=7").headers["refresh"] == "7"
        assert [client.get(f"/?refresh={bad}").status_code for bad in ("0", "x", "99999")] == [422] * 3
    assert answer.headers["content-type"] == "text/html; charset=utf-8" and "refresh" not in answer.headers
    policy = answer.headers["content-security-policy"]
    (style,) = re.findall(r"<style>(.*?)</style>", answer.text, re.S)
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    assert policy.startswith(f"default-src 'none'; style-src 'sha256-{digest}';") and "unsafe" not in policy
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert told.headers["content-type"] == "application/json"
    assert document.load(told.content).tenants[0].pod == "train" and "train" in answer.text


def test_those_who_wait_for_a_scan_share_it() -> None:
    """A file system that answers late: a crowd that asks meanwhile costs one scan more."""
    scans, begun, go = [0], threading.Event(), threading.Event()

    def snapshot() -> Snapshot:
        scans[0] += 1
        begun.set()
        assert go.wait(20)
        return Snapshot("n", 1.7e9)

    shown = page.Status(SharedScan(snapshot, interval=0.0))
    with ThreadPoolExecutor(16) as crowd:
        asked = [crowd.submit(shown.page if number % 2 else shown.json) for number in range(16)]
        assert begun.wait(20)
        time.sleep(0.2)  # the others come to wait; a late one makes a scan of its own
        go.set()
        assert all(each.result(20) for each in asked)
    assert scans[0] < 8


def test_a_broken_scan_is_a_page() -> None:
    """A reader learns that nothing is known."""

    def broken() -> Snapshot:
        raise RuntimeError("no luck")

    with node.serve(broken) as url:
        answer = httpx.get(url, trust_env=False)
    assert answer.status_code == 200 and "the scan of this node failed" in html.unescape(answer.text)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[chromium.Browser]:
    """One browser for the tests of this file."""
    folder = tmp_path_factory.mktemp("chromium")
    try:
        with chromium.launch(folder) as running:
            yield running
    except chromium.Unable as reason:
        pytest.skip(f"no Chromium: {reason}")


def _picture(name: str, png: bytes) -> None:
    assert png[:8] == b"\x89PNG\r\n\x1a\n"
    if os.environ.get("UPDATE_PICTURES"):
        PICTURES.mkdir(exist_ok=True)
        (PICTURES / name).write_bytes(png)


SIZES = [("status.png", 1280, False), ("status-phone.png", 360, False)]


@pytest.mark.parametrize(
    ("name", "width", "dark"),
    [*SIZES, ("", 360, True), ("", 1280, True), ("", 1000, False), ("", 800, False)],
)
def test_browser_shows_it_without_scripts(
    browser: chromium.Browser, tmp_path: Path, name: str, width: int, dark: bool
) -> None:
    """On a desk and on a phone, light and dark: all can be read, nothing is sideways, fetched or refused."""
    with node.busy(tmp_path) as snapshot, node.serve(lambda: snapshot) as url:
        shown = browser.page()
        shown.open(url, width, 800, dark=dark, mobile=width < 500)
        png = shown.screenshot()
        text = shown.value("document.body.innerText")
        assert shown.value("document.documentElement.scrollWidth") <= width
        assert len(shown.seen("Network.requestWillBeSent")) == 1
        assert shown.seen("Log.entryAdded") == [] and shown.seen("Runtime.consoleAPICalled") == []
        colours = {
            shown.value(f"getComputedStyle(document.querySelector('{kind}')).color")
            for kind in (".good", ".bad", "body")
        }
        back = shown.value("getComputedStyle(document.body).backgroundColor")
    for words in (
        "stray",
        "uncapped: not_injected",
        "4100 MiB / 4147 MiB (98 %)",
        "asked for 2048 MiB",
        "Tesla T4",
    ):
        assert words in text
    assert len(colours) == 3
    assert sum(map(int, re.findall(r"\d+", back)[:3])) < 150 if dark else back == "rgb(255, 255, 255)"
    assert struct.unpack(">I", png[16:20]) == (width,)
    if name:
        _picture(name, png)


def test_longest_names_do_not_scroll_sideways(browser: chromium.Browser, tmp_path: Path) -> None:
    """A pod's name of 253 letters and a namespace of 63 break on a phone."""
    with node.put(tmp_path, 1, Spec(), "c" * 63):
        pod = node.pod(1, name="p" * 253, namespace="n" * 63, containers=[{"name": "c" * 63}], label="1" * 63)
        snapshot = node.compose(tmp_path, node.Pods(pod, label="x" * 63))
    with node.serve(lambda: snapshot) as url:
        shown = browser.page()
        shown.open(url, 360, 800, mobile=True)
        assert shown.value("document.documentElement.scrollWidth") <= 360
        assert "p" * 253 in shown.value("document.body.innerText")
