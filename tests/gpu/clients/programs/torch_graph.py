"""A training step and a matrix product captured into graphs and replayed."""

import torch
from past import result
from torch_common import batch, network, past_the_quota

model, (data, labels) = network(), batch()
optimiser = torch.optim.SGD(model.parameters(), lr=1e-3)


def step() -> torch.Tensor:
    optimiser.zero_grad(set_to_none=True)
    loss = torch.nn.functional.cross_entropy(model(data), labels)
    loss.backward()
    optimiser.step()
    return loss


side = torch.cuda.Stream()
side.wait_stream(torch.cuda.current_stream())
with torch.cuda.stream(side):
    for _ in range(3):
        step()
torch.cuda.current_stream().wait_stream(side)
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    loss = step()
for _ in range(100):
    graph.replay()
torch.cuda.synchronize()
result("loss", loss.item())

weights, static = torch.randn(512, 512, device="cuda"), torch.randn(64, 512, device="cuda")
torch.relu(static @ weights)
torch.cuda.synchronize()
product = torch.cuda.CUDAGraph()
with torch.cuda.graph(product):
    replayed = torch.relu(static @ weights)
product.replay()
torch.cuda.synchronize()
result("equal", torch.equal(replayed, torch.relu(static @ weights)))
past_the_quota()
