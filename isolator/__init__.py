"""Kubernetes GPU-memory quotas for containers that share a GPU."""

__version__ = "1.2.0"
