"""What a monitor's word on a tenant, and a node's memory label, amount to, on a node and in a cluster."""

from __future__ import annotations

from isolator import names
from isolator.doctor.report import Report
from isolator.monitor import grants
from isolator.monitor.document import Flags
from isolator.monitor.model import State, Uncapped


def verdict(
    report: Report,
    subject: str,
    state: str,
    uncapped: str | None,
    reason: str,
    flags: Flags,
    refused: str = "tenant_wrong",
) -> None:
    """Notes what is wrong with the tenant `subject`; `refused` is the cause where CUDA was refused."""
    if state == State.UNCAPPED and uncapped == Uncapped.OPTED_OUT and not flags.bypass:
        report.find("opted_out", subject, reason)
    elif state == State.UNCAPPED or flags.bypass:
        report.find("tenant_uncapped", subject, reason or "a process uses the GPU past the library")
    if state == State.REFUSED:
        report.find(refused, subject, reason if refused != "tenant_wrong" else f"{state}: {reason}")
    if state == State.UNREADABLE:
        report.find("tenant_wrong", subject, f"{state}: {reason}")
    if flags.mismatch:
        report.find("tenant_wrong", subject, "its limit is above what KAI grants")
    if flags.tampered:
        report.find("tenant_wrong", subject, "somebody wrote into its cache file; the limit holds")


def label_fault(text: str | None) -> tuple[str, str] | None:
    """Cause and what is seen of a node's memory label that KAI cannot compute with; None: it can."""
    if not text:
        return "label_missing", f"no {names.NODE_LABEL_GPU_MEMORY}"
    if grants.card_mib(text) is None:
        return "label_bytes", f"it says {text!r}, which is no number"
    if grants.in_bytes(text):
        return "label_bytes", f"it says {text}: bytes, and MiB are meant"
    return None
