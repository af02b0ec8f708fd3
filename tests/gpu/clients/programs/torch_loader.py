"""Training from the workers of a loader that pins what they bring."""

from __future__ import annotations

import torch


class Data(torch.utils.data.Dataset):
    """Rows made in the workers."""

    def __len__(self) -> int:
        return 256

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.full((64,), float(index)), torch.tensor(float(index % 3))


if __name__ == "__main__":
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)
    model = torch.nn.Linear(64, 1).cuda()
    optimiser = torch.optim.SGD(model.parameters(), lr=1e-7)
    loader = torch.utils.data.DataLoader(Data(), batch_size=32, num_workers=4, pin_memory=True)
    for _ in range(2):
        for rows, goals in loader:
            guess = model(rows.cuda(non_blocking=True))[:, 0]
            loss = (guess - goals.cuda(non_blocking=True)).square().mean()
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
    print(loss.item())
