"""A small model, trained eagerly and then replayed as a captured graph; prints sums to compare."""

import torch

torch.manual_seed(1)
torch.backends.cuda.matmul.allow_tf32 = False
model = torch.nn.Sequential(
    torch.nn.Conv2d(3, 16, 3, padding=1),
    torch.nn.ReLU(),
    torch.nn.Flatten(),
    torch.nn.Linear(16 * 32 * 32, 10),
).cuda()
optimiser = torch.optim.SGD(model.parameters(), lr=1e-3)
data = torch.randn(32, 3, 32, 32, device="cuda")
labels = torch.randint(0, 10, (32,), device="cuda")
for _ in range(20):
    optimiser.zero_grad()
    torch.nn.functional.cross_entropy(model(data), labels).backward()
    optimiser.step()
weights = torch.randn(512, 512, device="cuda")
static = torch.randn(64, 512, device="cuda")
stream = torch.cuda.Stream()
with torch.cuda.stream(stream):
    for _ in range(3):
        torch.relu(static @ weights)
torch.cuda.synchronize()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    replayed = torch.relu(static @ weights)
for _ in range(100):
    graph.replay()
torch.cuda.synchronize()
print(torch.equal(replayed, torch.relu(static @ weights)))
