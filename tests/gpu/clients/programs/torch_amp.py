"""Training in mixed precision: bfloat16, and half with a gradient scaler."""

import torch
from past import result
from torch_common import batch, network, past_the_quota

for kind in (torch.bfloat16, torch.float16):
    model, (data, labels) = network(), batch()
    optimiser = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    scaler = torch.amp.GradScaler("cuda", enabled=kind is torch.float16)
    for _ in range(30):
        optimiser.zero_grad()
        with torch.autocast("cuda", dtype=kind):
            loss = torch.nn.functional.cross_entropy(model(data), labels)
        scaler.scale(loss).backward()
        scaler.step(optimiser)
        scaler.update()
    result(str(kind), loss.item())
past_the_quota()
