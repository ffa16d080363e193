"""One torch model trained alone, as a person would write it: the reference that fleets are compared with.

As little as can be is shared with the fused path: what is wrong there must not be wrong here in the same way.
"""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from modelfleet.frameworks.torch.arrays import place
from modelfleet.frameworks.torch.random.operations import DrawFromStreams
from modelfleet.frameworks.torch.random.streams import Streams
from modelfleet.members import member_seed
from modelfleet.streams import permutations
from modelfleet.trees import leaves, map_tree


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


OPTIMIZERS: Mapping[str, type[torch.optim.Optimizer]] = {
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
LOSSES: Mapping[str, Callable[[Any, Any], Tensor]] = {
    "cross_entropy": F.cross_entropy,
    "nll": F.nll_loss,
    "mse": F.mse_loss,
    "mae": F.l1_loss,
    "bce_with_logits": F.binary_cross_entropy_with_logits,
}
PRECISIONS = {"float32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def alone(
    model: nn.Module,
    name: str,
    data: Any,
    *,
    optimizer: str | type[torch.optim.Optimizer],
    loss: str | Callable[[Any, Any], Tensor] | None,
    objective: Callable[[nn.Module, Any], Any] | None,
    seed: int,
    epochs: int,
    batch_size: int,
    shuffle: bool,
    clip_norm: float | None,
    precision: str,
    schedule: Callable[[torch.optim.Optimizer], Any] | None,
    schedule_per: str,
    **hyperparameters: Any,
) -> nn.Module:
    """A trained copy of `model`; see `modelfleet.testing.alone`."""
    model = copy.deepcopy(model)
    if not model.training:
        model.train()
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    device = parameters[0].device
    make = OPTIMIZERS[optimizer] if isinstance(optimizer, str) else optimizer
    update = make(parameters, **hyperparameters)
    scheduler = None if schedule is None else schedule(update)
    scaler = torch.amp.GradScaler(device.type, enabled=precision == "fp16")
    own_seed = member_seed(seed, name)
    tensors = map_tree(lambda leaf: place(leaf, device), data)
    taken = 0  # steps that changed the weights: the member's random streams count these
    for epoch in range(epochs):
        for batch in _batches(tensors, own_seed if shuffle else None, epoch, batch_size):
            update.zero_grad()
            streams = Streams(torch.tensor(own_seed, device=device), torch.tensor(taken, device=device))
            cast = torch.autocast(device.type, PRECISIONS[precision], enabled=precision != "float32")
            with DrawFromStreams(streams), cast:
                value = _loss(model, batch, loss, objective)
            scaler.scale(value).backward()
            scaler.unscale_(update)
            if clip_norm is not None:
                nn.utils.clip_grad_norm_(parameters, clip_norm)
            scale = scaler.get_scale()
            scaler.step(update)
            scaler.update()
            taken += scaler.get_scale() >= scale
            if scheduler is not None and schedule_per == "step":
                scheduler.step()
        if scheduler is not None and schedule_per == "epoch":
            scheduler.step()
    return model


def _batches(data: Any, seed: int | None, epoch: int, size: int) -> Iterator[Any]:
    rows = len(leaves(data)[0])
    order = torch.arange(rows)
    if seed is not None:
        order = torch.from_numpy(permutations(np.array([seed]), epoch, np.array([rows]))[0])
    for chosen in order.split(size):
        yield map_tree(lambda leaf, chosen=chosen: leaf[chosen.to(leaf.device)], data)


def _loss(model: nn.Module, batch: Any, loss: Any, objective: Any) -> Tensor:
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


def weights(model: nn.Module) -> dict[str, np.ndarray]:
    """Parameters and buffers by name, in double precision: NumPy has no bfloat16."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return {name: tensor.detach().double().cpu().numpy() for name, tensor in tensors}
