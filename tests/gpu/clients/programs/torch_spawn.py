"""Spawned children that share a tensor of their parent's and make their own."""

from __future__ import annotations

import torch
import torch.multiprocessing as mp


def work(number: int, shared: torch.Tensor, results: torch.Tensor) -> None:
    """Adds to the shared one; one of its own beside it."""
    own = torch.full((1 << 20,), float(number), device="cuda")
    results[number] = (shared.double().sum() + own.double().sum()).item()


if __name__ == "__main__":
    shared = torch.ones(1 << 20, device="cuda")
    results = torch.zeros(3, dtype=torch.float64).share_memory_()
    mp.spawn(work, args=(shared, results), nprocs=3)
    print(results.tolist())
