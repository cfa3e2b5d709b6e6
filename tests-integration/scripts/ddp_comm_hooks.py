"""Communication hooks: gradients cross between processes in half precision, or as matrices of low rank."""

from samples import begin, digits, norm, report, train_on
from torch.optim import SGD
from torch.utils.data import DataLoader

from accelerate import Accelerator, DDPCommunicationHookType, DistributedDataParallelKwargs

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
    model, optimizer, loader = begin(accelerator, 7, SGD, DataLoader(digits(0, 128), batch_size=8), lr=0.1)
    losses = []
    for batch in loader:
        loss = train_on(accelerator, model, optimizer, batch)
        losses.append(accelerator.reduce(loss, "mean").item())
    found[name] = {"losses": losses, "weights": norm(accelerator, model)}
    accelerator.free_memory()
report(accelerator, **found)
