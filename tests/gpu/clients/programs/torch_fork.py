"""Children forked before and after the parent's first use of CUDA."""

from __future__ import annotations

import torch
import torch.multiprocessing as mp


def work(answers: mp.SimpleQueue) -> None:
    """A sum, or PyTorch's error."""
    try:
        answers.put(torch.ones(8, device="cuda").sum().item())
    except RuntimeError as error:
        answers.put(str(error)[:60])


def child() -> object:
    """What a forked child says."""
    context = mp.get_context("fork")
    answers = context.SimpleQueue()
    process = context.Process(target=work, args=(answers,))
    process.start()
    said = answers.get()
    process.join()
    return said


if __name__ == "__main__":
    print(child(), torch.ones(1, device="cuda").item(), child())
