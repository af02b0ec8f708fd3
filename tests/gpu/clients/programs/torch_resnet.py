"""ResNet-50 steps: cuDNN, cuBLAS and hundreds of kernels, loaded as they are needed."""

import torch
from past import result
from torch_common import past_the_quota
from torchvision.models import resnet50

torch.use_deterministic_algorithms(False)
torch.backends.cudnn.deterministic = True
torch.backends.cudnn.allow_tf32 = False
model = resnet50().cuda()
optimiser = torch.optim.SGD(model.parameters(), lr=1e-4)
data = torch.randn(16, 3, 224, 224, device="cuda")
for _ in range(4):
    optimiser.zero_grad()
    loss = model(data).square().mean()
    loss.backward()
    optimiser.step()
result("loss", f"{loss.item():.3f}")
past_the_quota()
