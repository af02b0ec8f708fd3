"""NCCL ranks of one machine: nccl_ranks.py RANKS MEETING-FILE."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from past import past, result


def rank(number: int, ranks: int, meeting: str) -> None:
    """One rank, on the card of its number."""
    torch.cuda.set_device(number)
    torch.manual_seed(1)
    dist.init_process_group("nccl", init_method=f"file://{meeting}", rank=number, world_size=ranks)
    print(f"total {number} {torch.cuda.mem_get_info()[1]}", flush=True)
    each = torch.full((1 << 20,), float(number + 1), device="cuda")
    dist.all_reduce(each)
    gathered = [torch.empty_like(each) for _ in range(ranks)]
    dist.all_gather(gathered, each)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(512, 512).cuda(), device_ids=[number])
    optimiser = torch.optim.SGD(model.parameters(), lr=1e-3)
    data = torch.randn(64, 512, device="cuda")
    for _ in range(10):
        optimiser.zero_grad()
        model(data).square().mean().backward()
        optimiser.step()
    if number == 0:
        result("sum", sum(one.double().sum().item() for one in gathered))
        result("weights", f"{sum(p.double().sum().item() for p in model.parameters()):.6f}")
    past(
        lambda: torch.empty(32 << 30, dtype=torch.uint8, device="cuda"),
        torch.OutOfMemoryError,
        lambda: torch.ones(1 << 20, device="cuda").sum().item(),
    )
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(rank, args=(int(sys.argv[1]), sys.argv[2]), nprocs=int(sys.argv[1]))
