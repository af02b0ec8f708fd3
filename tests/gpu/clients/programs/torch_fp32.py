"""Training in single precision."""

import torch
from past import result
from torch_common import batch, network, past_the_quota

model, (data, labels) = network(), batch()
optimiser = torch.optim.AdamW(model.parameters(), lr=1e-3)
for _ in range(30):
    optimiser.zero_grad()
    loss = torch.nn.functional.cross_entropy(model(data), labels)
    loss.backward()
    optimiser.step()
result("loss", loss.item())
result("weights", sum(p.double().sum().item() for p in model.parameters()))
past_the_quota()
