"""A function compiled by inductor into Triton kernels."""

import torch
from past import result
from torch_common import past_the_quota


@torch.compile
def gated(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.gelu(x) * torch.sigmoid(y) + x.softmax(-1)


x, y = torch.randn(512, 1024, device="cuda"), torch.randn(512, 1024, device="cuda")
result("sum", gated(x, y).double().sum().item())
past_the_quota()
