"""The text of a scrape: written once for all who ask within one scan, in the format each asks for.

prometheus_client writes it. What stays the same from scan to scan, a series' name and labels, is kept as the
library wrote it and only its value is put behind it anew: the library looks at each label's name, rune by
rune, in each line of each scrape, which was half of what a scrape of 1,000 containers took and three quarters
of one of 110 containers of 8 devices. Names of ours are valid in every format: so are the lines of each, but
for a client that wants valid names altered too.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Final

from prometheus_client.core import Metric
from prometheus_client.exposition import choose_encoder, generate_latest
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample
from prometheus_client.utils import floatToGoString

Encode = Callable[[Collector], bytes]
_Heads = dict[tuple[str, ...], str]
"""Name and label values of a sample -> its line up to the value; a family's samples share the label names."""

_VALUE: Final = "0.0"
_FORMATS: Final = 4
"""Texts kept of one scan: Prometheus servers of a few ages ask for as many formats."""


_ALTERED: Final = ("escaping=dots", "escaping=values")
"""Ends of the content type of texts whose names differ: the library writes these whole."""


class _Families(Collector):
    """Families as what the library's encoders take."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


def _bare(family: Metric, samples: list[Sample]) -> Metric:
    """The family with other samples."""
    made = Metric(family.name, family.documentation, family.type, family.unit)
    made.samples = samples
    return made


class Exposition:
    """Answers scrapes of `source`. As long as it gives the same family objects they are not written again.

    Its samples have neither times nor exemplars: a line is a name, labels and a value.

    Threads may ask at once: one writes, the others wait and take its text.
    """

    def __init__(self, source: Collector) -> None:
        self._source = source
        self._lock = threading.Lock()
        self._families: list[Metric] = []
        self._texts: dict[str, bytes] = {}
        self._heads: dict[str, _Heads] = {}

    def answer(self, accept: str) -> tuple[bytes, str]:
        """The text and its content type for an Accept header; the default for one that cannot be had."""
        try:
            encode, content_type = choose_encoder(accept)
        except (TypeError, ValueError):  # the client names a version that is none
            encode, content_type = choose_encoder("")
        families = list(self._source.collect())
        with self._lock:
            if not _same(families, self._families):
                self._families, self._texts = families, {}
            text = self._texts.get(content_type)
            if text is None:
                altered = content_type.endswith(_ALTERED)
                text = encode(_Families(families)) if altered else self._write(families, encode)
                if len(self._texts) < _FORMATS:
                    self._texts[content_type] = text
            return text, content_type

    def _write(self, families: list[Metric], encode: Encode) -> bytes:
        end = encode(_Families(())).decode()
        parts: list[str] = []
        heads: dict[str, _Heads] = {}
        for family in families:
            parts.append(encode(_Families([_bare(family, [])])).decode().removesuffix(end))
            heads[family.name] = self._lines(family, parts)
        self._heads = heads  # what was not served this time is forgotten
        parts.append(end)
        return "".join(parts).encode()

    def _lines(self, family: Metric, parts: list[str]) -> _Heads:
        """Adds the family's lines; the heads of its series."""
        samples = family.samples
        keys = [(sample.name, *sample.labels.values()) for sample in samples]
        known = self._heads.get(family.name, {})
        new = [(key, sample) for key, sample in zip(keys, samples, strict=True) if key not in known]
        if new:
            known = known | dict(zip((key for key, _ in new), _first(family, new), strict=True))
        lines = [known[key] for key in keys]
        number: Callable[[float], str] = floatToGoString
        parts += [f"{line}{number(sample.value)}\n" for line, sample in zip(lines, samples, strict=True)]
        return dict(zip(keys, lines, strict=True))


def _same(one: list[Metric], other: list[Metric]) -> bool:
    return len(one) == len(other) and all(a is b for a, b in zip(one, other, strict=True))


def _first(family: Metric, new: list[tuple[tuple[str, ...], Sample]]) -> list[str]:
    """The lines of series that were not seen before, without their values, as the library writes them."""
    samples = [Sample(sample.name, sample.labels, 0.0) for _, sample in new]
    text = generate_latest(_Families([_bare(family, samples)])).decode()
    # Only the newline ends a line: splitlines() knows others, which a label may hold.
    return [line.removesuffix(_VALUE) for line in text.split("\n") if line and not line.startswith("#")]
