"""Shared by the programs: each prints its results, and under a quota asks for more than it allows."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any


def result(name: str, value: Any) -> None:
    """One line to compare with the bare run."""
    print(f"result {name} {value}", flush=True)


def past(ask: Callable[[], Any], error: type[BaseException], alive: Callable[[], Any]) -> None:
    """Under a quota: `ask` must raise `error`, and `alive` must work afterwards."""
    if not os.environ.get("CUDA_DEVICE_MEMORY_LIMIT"):
        return
    try:
        ask()
    except error as refused:
        print(f"refused {type(refused).__name__}")
        del refused
    else:
        print("granted")
    alive()
    print("alive")
