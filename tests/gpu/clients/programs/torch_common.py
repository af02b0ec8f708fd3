"""What the PyTorch programs share."""

from __future__ import annotations

import torch
from past import past

GIB = 1 << 30
torch.manual_seed(1)
torch.use_deterministic_algorithms(True)
torch.backends.cuda.matmul.allow_tf32 = False


def past_the_quota() -> None:
    """32 GiB more raise PyTorch's own error; 256 MiB come after it."""

    def small() -> None:
        assert torch.ones(64 << 20, device="cuda").sum().item() == 64 << 20

    past(lambda: torch.empty(32 * GIB, dtype=torch.uint8, device="cuda"), torch.OutOfMemoryError, small)


def network() -> torch.nn.Module:
    """A small convolutional network."""
    return torch.nn.Sequential(
        torch.nn.Conv2d(3, 16, 3, padding=1),
        torch.nn.ReLU(),
        torch.nn.Flatten(),
        torch.nn.Linear(16 * 32 * 32, 10),
    ).cuda()


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    """Pictures and labels."""
    return torch.randn(32, 3, 32, 32, device="cuda"), torch.randint(0, 10, (32,), device="cuda")
