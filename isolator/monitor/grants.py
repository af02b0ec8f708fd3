"""What KAI Scheduler grants a fraction pod: its own rounding, so that a recorded limit can be checked.

The limit is computed from the pod's annotations and the node's label and never read from KAI's ConfigMap:
the monitor then needs no right to read ConfigMaps of tenants, and a tenant who edits the ConfigMap is seen
because the recorded limit no longer fits the computed one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from isolator import names

MIB: Final = 1 << 20
TOLERANCE: Final = MIB
"""Bytes that a recorded limit may exceed the computed one by: the limit is written in whole MiB."""
_BYTES_FROM: Final = 1 << 20
"""KAI's scheduler takes a label of at least this for bytes; its binder does not (limit then far too high)."""
_NO_LABEL_MIB: Final = 100
"""MiB of a card that KAI's scheduler assumes where the label is missing or unreadable."""


class Basis(StrEnum):
    """Why a limit is expected, or why none can be."""

    KNOWN = "known"
    NO_FRACTION = "no_fraction"
    AMBIGUOUS = "ambiguous"
    MALFORMED = "malformed"
    NO_LABEL = "no_label"
    LABEL_IN_BYTES = "label_in_bytes"
    ZERO_PORTION = "zero_portion"
    NVFRACTIONS = "nvfractions"


@dataclass(frozen=True)
class Grant:
    """KAI's grant on each device of a pod: portion as written ("0.27"), limit in bytes; None = unknown."""

    basis: Basis
    portion: str | None = None
    limit: int | None = None


def _whole(text: str) -> int | None:
    """A positive decimal integer as Go's ParseInt takes it, else None."""
    digits = text[1:] if text.startswith("+") else text
    return int(digits) if digits.isascii() and digits.isdigit() and 0 < len(digits) < 19 else None


def _fraction(text: str) -> float | None:
    """A number in (0, 1), else None."""
    try:
        value = float(text)
    except ValueError:
        return None
    return value if 0 < value < 1 else None


def card_mib(label: str | None) -> int | None:
    """MiB of one card of a node, from its label; a label in bytes is converted. None where unknown."""
    value = _whole(label) if label is not None else None
    if not value:
        return None
    return value // MIB if value >= _BYTES_FROM else value


def in_bytes(label: str) -> bool:
    """Whether a label is what KAI's scheduler takes for bytes."""
    return (_whole(label) or 0) >= _BYTES_FROM


def portion_of_memory(request_mib: int, label: str | None) -> float:
    """KAI's portion of a `gpu-memory` request, in double precision and in KAI's order of operations.

    The order matters: 1400 of 20000 MiB gives 0.08, not 0.07.
    """
    card = card_mib(label) or _NO_LABEL_MIB
    rounded = card - card % 100
    if rounded == 0:
        return math.inf
    return math.ceil(request_mib / rounded * 100) / 100


def _portion(annotations: Mapping[str, str], label: str | None) -> float | Basis:
    memory = annotations.get(names.ANNOTATION_MEMORY)
    fraction = annotations.get(names.ANNOTATION_FRACTION)
    if memory is not None and fraction is not None:
        return Basis.AMBIGUOUS
    if memory is not None:
        request = _whole(memory)
        return Basis.MALFORMED if not request else portion_of_memory(request, label)
    if fraction is not None:
        share = _fraction(fraction)
        return Basis.MALFORMED if share is None else share
    if any(key.startswith(names.NVFRACTIONS_PREFIX) for key in annotations):
        return Basis.NVFRACTIONS
    return Basis.NO_FRACTION


def expected(annotations: Mapping[str, str], label: str | None) -> Grant:
    """The limit that KAI's binder writes for a pod with these annotations on a node with this label.

    `label` is the raw text of the node's memory label, None where it is absent. With a label in bytes the
    grant is what the scheduler accounts (the card in MiB), which the binder's own figure exceeds by far:
    the recorded limit, clamped to the card, then shows as a mismatch.
    """
    portion = _portion(annotations, label)
    if isinstance(portion, Basis):
        return Grant(portion)
    card = card_mib(label)
    if card is None or label is None or math.isinf(portion):
        return Grant(Basis.NO_LABEL)  # of a card below 100 MiB KAI makes nothing: a label in GiB
    written = f"{portion:.2f}"
    limit = int(card * float(written)) * MIB
    if limit == 0:
        return Grant(Basis.ZERO_PORTION, written)
    return Grant(Basis.LABEL_IN_BYTES if in_bytes(label) else Basis.KNOWN, written, limit)


def exceeds(grant: Grant, recorded: int) -> bool:
    """Whether a device's recorded limit (bytes) is higher than the grant allows.

    A lower one is no fault: the tenant may lower its own limit, and one above the card is clamped to it.
    No limit at all (0) is not a mismatch but an uncapped container. Unknown grants never mismatch.
    """
    return grant.limit is not None and recorded > grant.limit + TOLERANCE
