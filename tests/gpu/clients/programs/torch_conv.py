"""Convolutions whose search for an algorithm wants more work space than the quota leaves."""

import os

import torch
from past import result
from torch_common import past_the_quota

torch.backends.cudnn.benchmark = True
torch.use_deterministic_algorithms(False)
torch.backends.cudnn.allow_tf32 = False
data = torch.randn(64, 128, 56, 56, device="cuda", requires_grad=True)
layer = torch.nn.Conv2d(128, 128, 3, padding=1).cuda()
free = torch.cuda.mem_get_info()[0]
# Under a quota nearly all of it is taken; a bare run leaves the card to others.
held = bool(os.environ.get("CUDA_DEVICE_MEMORY_LIMIT"))
filler = torch.empty(free - (1200 << 20) if held else 0, dtype=torch.uint8, device="cuda")
out = layer(data)
out.sum().backward()
torch.cuda.synchronize()
del filler
torch.cuda.empty_cache()
result("forward", f"{out.double().mean().item():.5f}")
result("backward", f"{data.grad.double().abs().mean().item():.4f}")
past_the_quota()
