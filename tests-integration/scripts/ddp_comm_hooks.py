"""Communication hooks: gradients cross between processes in half precision, or as matrices of low rank."""

from samples import classifier, digits, norm, report
from torch.nn.functional import cross_entropy
from torch.optim import SGD
from torch.utils.data import DataLoader

from accelerate import Accelerator, DDPCommunicationHookType, DistributedDataParallelKwargs
from accelerate.utils import set_seed

HOOKS = {
    "none": {},
    "fp16": {"comm_hook": DDPCommunicationHookType.FP16},
    "power": {
        "comm_hook": DDPCommunicationHookType.POWER_SGD,
        "comm_state_option": {"matrix_approximation_rank": 2, "start_powerSGD_iter": 2},
    },
    "wrapped": {"comm_hook": DDPCommunicationHookType.POWER_SGD, "comm_wrapper": DDPCommunicationHookType.FP16},
}

found = {}
for name, options in HOOKS.items():
    accelerator = Accelerator(cpu=True, kwargs_handlers=[DistributedDataParallelKwargs(**options)])
    set_seed(7)
    model = classifier()
    optimizer = SGD(model.parameters(), lr=0.1)
    loader = DataLoader(digits(0, 128), batch_size=8)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses = []
    for values, classes in loader:
        loss = cross_entropy(model(values), classes)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
    found[name] = {"losses": losses, "weights": norm(accelerator, model)}
    accelerator.free_memory()
report(accelerator, **found)
accelerator.end_training()
