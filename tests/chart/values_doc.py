"""Makes docs/values.md from the comments of the chart's values.yaml.

`python tests/chart/values_doc.py` writes the page; a test compares it. A value is a key with a comment that
begins `# -- `; a map without one is a section.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import yaml

ROOT = Path(__file__).resolve().parent.parent.parent
VALUES = ROOT / "charts" / "kai-resource-isolator" / "values.yaml"
PAGE = ROOT / "docs" / "values.md"
MARK = "# -- "
HEAD = """# Chart values

Generated from `charts/kai-resource-isolator/values.yaml` by `python tests/chart/values_doc.py`. The schema is
closed: a key that is not listed here is refused by `helm install`, with a line that names it. Only below
`global` are other keys let through, because Helm hands one `global` to every chart of an umbrella.
"""


class Value(NamedTuple):
    """One documented value; `sentence` is "" where the comment is missing."""

    path: str
    default: object
    sentence: str


def values(text: str) -> Iterator[Value]:
    """Every value of the file in its order."""
    lines = text.splitlines()

    def walk(node: yaml.MappingNode, prefix: str) -> Iterator[Value]:
        for key, value in node.value:
            path = f"{prefix}{key.value}"
            above = lines[key.start_mark.line - 1].strip() if key.start_mark.line else ""
            sentence = above.removeprefix(MARK) if above.startswith(MARK) else ""
            if isinstance(value, yaml.MappingNode) and value.value and not sentence:
                yield from walk(value, f"{path}.")
            else:
                yield Value(path, yaml.safe_load(yaml.serialize(value)), sentence)

    root = yaml.compose(text)
    assert isinstance(root, yaml.MappingNode)
    yield from walk(root, "")


def _cell(text: str) -> str:
    """Without an end of the cell in it; a table's bar is escaped in code spans as well."""
    return text.replace("|", "\\|")


def _escaped(sentence: str) -> str:
    """`<` begins HTML outside of code spans, and inside of them stands for itself."""
    pieces = re.split(r"(`[^`]*`)", sentence)
    return "".join(piece if piece.startswith("`") else piece.replace("<", "&lt;") for piece in pieces)


def page(text: str) -> str:
    """The whole page as Markdown, a table a section."""
    out, section = [HEAD], None
    for path, default, sentence in values(text):
        top = path.split(".")[0] if "." in path else "general"
        if top != section:
            out.append(f"\n## {top}\n\n| value | default | what it does |\n|---|---|---|\n")
            section = top
        out.append(f"| `{path}` | `{_cell(json.dumps(default))}` | {_escaped(_cell(sentence))} |\n")
    return "".join(out)


if __name__ == "__main__":
    PAGE.write_text(page(VALUES.read_text()))
