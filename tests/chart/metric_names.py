"""The metrics that an expression asks for, and those that there are."""

from __future__ import annotations

import re

from isolator.monitor import metrics as monitor
from isolator.webhook.metrics import Metrics

KNOWN = {row.name for row in monitor.table(legacy=False)} | {
    family.name + end for family in Metrics().registry.collect() for end in ("", "_total", "_bucket")
}
_WORDS = set(
    "sum count min max by on topk rate increase vector time and or unless absent label_replace group "
    "histogram_quantile".split()
)


def names_in(expression: str) -> set[str]:
    """The metrics of an expression: what is left without texts, matchers, ranges, labels, functions."""
    bare = re.sub(r'"(?:[^"\\]|\\.)*"', "", expression)
    bare = re.sub(r"\{[^}]*\}|\[[^\]]*\]|\b(?:by|on) \([^)]*\)", "", bare)
    return set(re.findall(r"[a-zA-Z_:][\w:]*", bare)) - _WORDS
