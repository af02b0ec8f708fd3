"""What /status.json and / answer, made once a scan however many ask."""

from __future__ import annotations

import base64
import functools
import hashlib
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Final

from isolator.monitor import document, status, words
from isolator.monitor.document import Document
from isolator.monitor.shared import SharedScan
from isolator.monitor.view import View

if TYPE_CHECKING:
    from jinja2 import Template

_FOLDER: Final = Path(__file__).parent
_TEMPLATE: Final = "status.html"
_STYLE: Final = "status.css"


@functools.cache
def _style() -> str:
    return (_FOLDER / _STYLE).read_text("utf-8")


@functools.cache
def _template() -> Template:
    """The page; jinja2 is loaded with the first one, most monitors never show any."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(_FOLDER),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        cache_size=1,
    )
    environment.filters.update(size=words.size, percent=words.percent, age=words.age, clock=words.clock)
    return environment.get_template(_TEMPLATE)


def headers() -> dict[str, str]:
    """The page's own: nothing is loaded, run, sent or framed; the one style sheet is named by its hash."""
    digest = base64.b64encode(hashlib.sha256(_style().encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    return {
        "Content-Security-Policy": f"{policy}; frame-ancestors 'none'",
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-store",
    }


def render(shown: Document) -> str:
    """The page of a document, HTML."""
    return _template().render(
        document=shown, node=shown.node, rows=words.rows(shown), style=_style(), words=words
    )


class Status:
    """Answers from the scan that all share; threads may ask at once."""

    def __init__(self, scan: SharedScan) -> None:
        self._scan = scan
        self._lock = threading.Lock()
        self._view: View | None = None
        self._document: Document | None = None
        self._json: bytes | None = None
        self._page: bytes | None = None

    def json(self) -> bytes:
        """The document as JSON."""
        view = self._scan.view()  # outside the lock: those who wait for a scan share it
        with self._lock:
            shown = self._of(view)
            self._json = self._json or document.dump(shown)
            return self._json

    def page(self) -> bytes:
        """The document as HTML, UTF-8."""
        view = self._scan.view()
        with self._lock:
            shown = self._of(view)
            self._page = self._page or render(shown).encode("utf-8", "replace")
            return self._page

    def _of(self, view: View) -> Document:
        if self._document is None or view is not self._view:
            self._view, self._document = view, status.document(view)
            self._json = self._page = None
        return self._document
