"""A live torch program, told on standard input what to do.

"burst WORK STEPS" is answered by the nanoseconds a step took, and by those of processor time (of all
threads) to issue it, the wait for the GPU at the end left out; "control GIB" by 0 where so much is had at
once, 2 where torch says out of memory.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import torch

Step = Callable[[], None]


def _training(
    model: torch.nn.Module, data: torch.Tensor, loss: Callable[[torch.Tensor], torch.Tensor]
) -> Step:
    optimiser = torch.optim.SGD(model.parameters(), lr=1e-4)

    def step() -> None:
        optimiser.zero_grad(set_to_none=True)
        loss(model(data)).backward()
        optimiser.step()

    return step


def linear() -> Step:
    """Many small kernels: 32 linear layers of 256, batch 64."""
    layers = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(32))).cuda()
    return _training(layers, torch.randn(64, 256, device="cuda"), torch.sum)


def transformer() -> Step:
    """One training step of a small transformer."""
    layer = torch.nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True)
    model = torch.nn.TransformerEncoder(layer, 4, enable_nested_tensor=False).cuda()
    return _training(model, torch.randn(8, 128, 256, device="cuda"), torch.sum)


def resnet() -> Step:
    """One training step of ResNet-50 on four pictures."""
    from torchvision.models import resnet50

    return _training(resnet50().cuda(), torch.randn(4, 3, 224, 224, device="cuda"), torch.sum)


def _decoder() -> tuple[torch.nn.Module, torch.Tensor]:
    layer = torch.nn.TransformerEncoderLayer(512, 8, 2048, dropout=0.0, batch_first=True)
    model = torch.nn.TransformerEncoder(layer, 6, enable_nested_tensor=False).cuda().half().eval()
    return model, torch.randn(1, 1, 512, device="cuda", dtype=torch.half)


def decode() -> Step:
    """One token through a small decoder, kernel by kernel."""
    model, token = _decoder()

    def step() -> None:
        with torch.no_grad():
            model(token)

    return step


def graphed() -> Step:
    """The same, replayed from a captured graph."""
    step = decode()
    for _ in range(3):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def _burst(step: Step, count: int) -> str:
    began, worked = time.perf_counter_ns(), time.process_time_ns()
    for _ in range(count):
        step()
    worked = time.process_time_ns() - worked
    torch.cuda.synchronize()
    return f"{(time.perf_counter_ns() - began) / count} {worked / count}"


def _control(gib: int) -> int:
    try:
        torch.empty(gib << 30, dtype=torch.uint8, device="cuda")
    except torch.OutOfMemoryError:
        return 2
    torch.cuda.empty_cache()
    return 0


def main() -> None:
    """Serves until the input ends."""
    torch.manual_seed(1)
    made: dict[str, Step] = {}
    for line in sys.stdin:
        verb, work, *count = line.split()
        if verb == "control":
            print(_control(int(work)), flush=True)
            continue
        if work not in made:
            made[work] = globals()[work]()
            for _ in range(10):
                made[work]()
            torch.cuda.synchronize()
        print(_burst(made[work], int(count[0])), flush=True)


if __name__ == "__main__":
    main()
