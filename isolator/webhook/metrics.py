"""The webhook's own metrics, in a registry of their own with the process's CPU, memory and descriptors."""

from __future__ import annotations

from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector

from isolator.names import METRIC_PREFIX_OWN as OWN

_SECONDS: Final = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 1.0, 3.0)


class Metrics:
    """One attribute a metric."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        self.admissions = Counter(
            f"{OWN}admissions_total",
            "Reviews answered, by what was done and why.",
            ("action", "reason"),
            registry=registry,
        )
        self.errors = Counter(
            f"{OWN}admission_errors_total",
            "Reviews answered by an HTTP error, so that the failure policy decides.",
            registry=registry,
        )
        self.duration = Histogram(
            f"{OWN}admission_duration_seconds",
            "From a review's headers to its answer.",
            registry=registry,
            buckets=_SECONDS,
        )
        self.expiry = Gauge(
            f"{OWN}certificate_expiry_timestamp_seconds",
            "When the serving certificate ends, in seconds since the epoch; 0 while there is none.",
            registry=registry,
        )
        self.loads = Counter(
            f"{OWN}certificate_loads_total",
            "Serving certificates taken (ok) and turned down (failed).",
            ("result",),
            registry=registry,
        )
        for result in ("ok", "failed"):
            self.loads.labels(result)
