"""Reference for torch members: one model, trained alone by a loop as a user would write it.

The loop shares as little as possible with the fused path, so that an error there is not repeated here.
"""

import copy
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from modelfleet.frameworks.torch.arrays import place
from modelfleet.frameworks.torch.random.operations import DrawFromStreams
from modelfleet.frameworks.torch.random.streams import Streams
from modelfleet.testing.reference import Training
from modelfleet.trees import leaves, map_tree
from modelfleet.types import Arrays, Data, Tree


class Lion(torch.optim.Optimizer):
    """Lion as in its paper (Chen et al. 2023, algorithm 2), which torch does not have."""

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Take one step."""
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                average = self.state[parameter].setdefault("average", torch.zeros_like(parameter))
                direction = (beta1 * average + (1 - beta1) * parameter.grad).sign()
                parameter -= group["lr"] * (direction + group["weight_decay"] * parameter)
                average.copy_(beta2 * average + (1 - beta2) * parameter.grad)


OPTIMIZERS: Mapping[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "rmsprop": torch.optim.RMSprop,
    "adagrad": torch.optim.Adagrad,
    "adadelta": torch.optim.Adadelta,
    "nadam": torch.optim.NAdam,
    "radam": torch.optim.RAdam,
    "adamax": torch.optim.Adamax,
    "lion": Lion,
}
LOSSES: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cross_entropy": F.cross_entropy,
    "nll": F.nll_loss,
    "mse": F.mse_loss,
    "mae": F.l1_loss,
    "bce_with_logits": F.binary_cross_entropy_with_logits,
}
PRECISIONS = {"float32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def alone(model: nn.Module, data: Data, training: Training) -> nn.Module:
    """Return a trained copy of `model` (see `modelfleet.testing.alone`)."""
    model = copy.deepcopy(model)
    if not model.training:
        model.train()
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    device = parameters[0].device
    named = isinstance(training.optimizer, str)
    make = OPTIMIZERS[training.optimizer] if named else training.optimizer
    optimizer = make(parameters, **training.hyperparameters)
    scheduler = None if training.schedule is None else training.schedule(optimizer)
    scaler = torch.amp.GradScaler(device.type, enabled=training.precision == "fp16")
    dtype = PRECISIONS[training.precision]
    tensors = map_tree(lambda leaf: place(leaf, device), data)
    steps = 0  # steps that changed the weights: the member's random streams count these
    for epoch in range(training.epochs):
        for rows in training.rows(len(leaves(tensors)[0]), epoch):
            chosen = torch.from_numpy(rows).to(device)
            batch = map_tree(lambda leaf, chosen=chosen: leaf[chosen], tensors)
            optimizer.zero_grad()
            streams = Streams(torch.tensor(training.seed, device=device), torch.tensor(steps, device=device))
            cast = torch.autocast(device.type, dtype, enabled=dtype != torch.float32)
            with DrawFromStreams(streams), cast:
                loss = _loss(model, batch, training)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            if training.clip_norm is not None:
                nn.utils.clip_grad_norm_(parameters, training.clip_norm)
            scale = scaler.get_scale()
            scaler.step(optimizer)
            scaler.update()
            steps += scaler.get_scale() >= scale
            if scheduler is not None and training.schedule_per == "step":
                scheduler.step()
        if scheduler is not None and training.schedule_per == "epoch":
            scheduler.step()
    return model


def _loss(model: nn.Module, batch: Tree, training: Training) -> Tensor:
    loss, objective = training.loss, training.objective
    if objective is not None:
        result = objective(model, batch)
        return result[0] if isinstance(result, tuple) else result
    if loss is None:
        return model(**batch).loss
    x, target = batch
    function = LOSSES[loss] if isinstance(loss, str) else loss
    if isinstance(x, Mapping):
        return function(model(**x), target)
    return function(model(*x) if isinstance(x, tuple | list) else model(x), target)


def weights(model: nn.Module) -> Arrays:
    """Return parameters and buffers by name, in double precision, since NumPy has no bfloat16."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return {name: tensor.detach().double().cpu().numpy() for name, tensor in tensors}
