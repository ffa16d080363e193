"""What the programs do to torch models by plain torch: `torch.optim` and a loop for each member."""

import copy
import math
from collections.abc import Iterator
from typing import Any

import torch
from tests.fuzz.draws import drawing, order, seed_of
from tests.fuzz.models_torch import Net, make, observe
from tests.fuzz.programs import Add, Compile, Data, Edit, Evaluate, Fit, Freeze, Predict, Recipe, Train, turns
from tests.fuzz.recipes_torch import CLASSES, PAIRS, SCHEDULES, loss_of, plain_loss
from tests.fuzz.reference import Reference, Totals, zipped
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

Batch = tuple[Tensor, Tensor]
History = dict[str, dict[str, list[float]]]


class TorchReference(Reference):
    """Members, each with its model, its optimizer and its loss."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.trunk: dict[str, nn.Module] = {}
        self.nets: dict[str, Net] = {}
        self.models: dict[str, Any] = {}
        self.recipes: dict[str, tuple[Recipe, dict[str, Any], dict[str, Any]]] = {}
        self.optimizers: dict[str, torch.optim.Optimizer] = {}
        self.steps: dict[str, int] = {}  # of members since they came
        self.epochs: dict[str, int] = {}

    # --- models ------------------------------------------------------------------------------------------------

    def enlist(self, name: str, net: Net) -> None:
        self.nets[name] = net
        self.models[name] = make(net, self.program.dtype, self.trunk)

    def observe(self, name: str) -> dict[str, Any]:
        return observe(self.models[name])

    def forget(self, name: str) -> None:
        del self.models[name]
        self.recipes.pop(name, None)
        self.optimizers.pop(name, None)

    def clone(self, name: str, new: str) -> None:
        memo: dict[int, Any] = {id(one): one for trunk in self.trunk.values() for one in trunk.parameters()}
        for kept in (value for module in self.models[name].modules() for value in vars(module).values()):
            if isinstance(kept, torch.Tensor) and not kept.is_leaf:  # which torch does not copy
                memo[id(kept)] = kept.detach().clone()
        self.models[new] = copy.deepcopy(self.models[name], memo)
        self.nets[new], self.recipes[new] = self.nets[name], self.recipes[name]
        self.steps[new], self.epochs[new] = self.steps.get(name, 0), self.epochs.get(name, 0)
        if name in self.optimizers:
            self._optimizer(new).load_state_dict(copy.deepcopy(self.optimizers[name].state_dict()))

    def reload(self) -> None:
        """Models as they were made, with the weights of now: a state dict has nothing of what Python holds."""
        for name in self.names:
            made = make(self.nets[name], self.program.dtype, self.trunk)
            made.load_state_dict(self.models[name].state_dict())
            self.models[name] = made
        for kept in (self.recipes, self.optimizers, self.steps, self.epochs):
            kept.clear()

    def freeze(self, verb: Freeze, name: str) -> None:
        freeze(self.models[name], verb)

    def edit(self, verb: Edit, name: str, other: str) -> None:
        edit(self.models[name], self.models[other], verb)

    def train(self, verb: Train, name: str, batches: Any) -> None:
        train(self.models[name], batches, self.program.task)

    # --- training ----------------------------------------------------------------------------------------------

    def compile(self, verb: Compile | Add, names: list[str]) -> None:
        for number, name in enumerate(names):
            own = {key: value if key in PAIRS else turns(value, number) for key, value in verb.recipe.hyper} | {
                "clip": turns(verb.recipe.clip, number)
            }
            loss = loss_of(verb.recipe, self.program.task, self.program.dtype, self.knob)
            self.recipes[name] = (verb.recipe, own, loss)
            for kept in (self.optimizers, self.steps, self.epochs):
                kept.pop(name, None)

    def _optimizer(self, name: str) -> torch.optim.Optimizer:
        if name not in self.optimizers:
            recipe, own, _ = self.recipes[name]
            options = {key: value for key, value in own.items() if key != "clip"}
            self.optimizers[name] = CLASSES[recipe.optimizer](self.models[name].parameters(), **options)
        return self.optimizers[name]

    def fit(self, verb: Fit, callback: Any) -> History:
        names = list(self.names)
        epochs = {name: turns(verb.epochs, number) for number, name in enumerate(names)}
        history: History = {name: {} for name in names}
        members = {name: _Member(self, name, verb, epochs[name]) for name in names}
        modes = {name: [m.training for m in self.models[name].modules()] for name in names}
        stopped: set[str] = set()
        sources = self.sources(verb.data, verb.batch, names, verb.limit)
        if verb.shuffle and verb.data.form == "arrays":
            sources = {name: _Shuffled(self, name, verb) for name in names}
        for name in names:
            if not self.models[name].training:
                self.models[name].train()
        for epoch in range(max(epochs.values())):
            active = [name for name in names if epoch < epochs[name] and name not in stopped]
            totals: dict[str, Totals] = {name: Totals() for name in active}
            for batches in zipped(sources, active):
                for name, batch in batches.items():
                    if name in active:
                        members[name].step(batch, totals[name])
            for name in active:
                self.epochs[name] = self.epochs.get(name, 0) + 1
                totals[name].note(history[name], "")
                members[name].end_epoch()
                if verb.validation is not None:
                    values = self._evaluated(name, self.batches(verb.validation, verb.validation_batch, name))
                    values.note(history[name], "val_")
            if not active:
                break
            stopped |= callback(epoch + 1)
        for name in names:
            for module, mode in zip(self.models[name].modules(), modes[name], strict=True):
                module.training = mode
        callback(0)
        return history

    def evaluate(self, verb: Evaluate) -> dict[str, dict[str, float]]:
        return {
            name: self._evaluated(name, self.batches(verb.data, verb.batch, name)).values() for name in self.names
        }

    def _evaluated(self, name: str, batches: Any) -> Totals:
        model, totals = self.models[name], Totals()
        recipe, _, loss = self.recipes[name]
        with evaluating(model), torch.no_grad(), autocast(recipe):
            for batch in batches:
                totals.add(plain_loss(loss, self.program.task)(model, batch), batch, recipe)
        return totals

    def predict(self, verb: Predict) -> dict[str, Any]:
        found = {}
        for name in self.names:
            model = self.models[name]
            batches = self.batches(verb.data, verb.batch, name)
            cast = autocast(self.recipes[name][0]) if name in self.recipes else autocast(Recipe())
            with evaluating(model), torch.no_grad(), cast:
                found[name] = torch.cat([model(x) for x, _ in batches])
        return found

    def tensors(self, data: Data, member: int | None) -> Batch:
        x, y = self.arrays(data, member)
        return torch.from_numpy(x), torch.from_numpy(y)

    def loader(self, data: Data, batch: int, member: int | None) -> Any:
        x, y = self.tensors(data, member)
        if data.form == "shuffled":
            generator = torch.Generator().manual_seed(data.seed)
            return DataLoader(TensorDataset(x, y), batch, shuffle=True, generator=generator)
        return [(x[cut].clone(), y[cut].clone()) for cut in self.cuts(data, len(x), batch)]


class _Shuffled:
    """A member's arrays in its own order, a new one in every epoch."""

    def __init__(self, own: TorchReference, name: str, verb: Fit) -> None:
        self.own, self.name, self.size = own, name, own.size(verb.data, verb.batch, name)
        self.data = own.tensors(verb.data, None if verb.data.own is None else own.numbers[name])

    def __iter__(self) -> Iterator[Batch]:
        x, y = self.data
        rows = torch.from_numpy(order(seed_of(self.name), self.own.epochs.get(self.name, 0), len(x)))
        for chosen in rows.split(self.size):
            yield x[chosen], y[chosen]


class _Member:
    """One member in one fit."""

    def __init__(self, own: TorchReference, name: str, verb: Fit, epochs: int) -> None:
        self.own, self.name = own, name
        self.model, self.task = own.models[name], own.program.task
        self.recipe, self.options, self.loss = own.recipes[name]
        self.optimizer = own._optimizer(name)
        self.base = self.options["lr"]
        self.taken = 0
        rows = own.rows(verb.data, name)
        size = own.size(verb.data, verb.batch, name)
        own_steps = len(list(own.cuts(verb.data, rows, size)))
        self.total = epochs * (own_steps if verb.limit is None else verb.limit)
        self._set_rate(self.base)
        self.scheduler = None
        if self.recipe.schedule in SCHEDULES:
            for group in self.optimizer.param_groups:
                group["initial_lr"] = self.base
            self.scheduler = SCHEDULES[self.recipe.schedule](self.optimizer)

    def _set_rate(self, rate: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = rate

    def step(self, batch: Batch, totals: "Totals") -> None:
        if self.recipe.schedule == "cosine":
            self._set_rate(self.base * 0.5 * (1 + math.cos(math.pi * self.taken / self.total)))
        elif self.recipe.schedule == "linear":
            self._set_rate(self.base * (1 - self.taken / self.total))
        self.optimizer.zero_grad()
        with autocast(self.recipe), drawing(self.name, self.own.steps.get(self.name, 0)):
            result = plain_loss(self.loss, self.task)(self.model, (batch[0].clone(), batch[1].clone()))
        result[0].backward()
        if self.options["clip"] is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.options["clip"])
        self.optimizer.step()
        self.taken += 1
        self.own.steps[self.name] = self.own.steps.get(self.name, 0) + 1
        totals.add(result, batch, self.recipe)

    def end_epoch(self) -> None:
        if self.scheduler is not None:
            self.scheduler.step()


class evaluating:  # noqa: N801  (used as a function)
    """A model in evaluation mode for a while."""

    def __init__(self, model: nn.Module) -> None:
        self.modules = list(model.modules())
        self.modes = [module.training for module in self.modules]
        model.eval()

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None:
        for module, mode in zip(self.modules, self.modes, strict=True):
            module.training = mode


def autocast(recipe: Recipe) -> Any:
    return torch.autocast("cpu", torch.bfloat16, enabled=recipe.precision == "bf16")


# --- what users do to models, in the fleet and alone ---------------------------------------------------------


def freeze(model: Any, verb: Freeze) -> None:
    parts = [*model.parts, model.head]
    parts[verb.part % len(parts)].requires_grad_(not verb.on)


def edit(model: Any, other: Any, verb: Edit) -> None:
    if verb.how == "attribute":
        for module in model.modules():
            if hasattr(module, "scale"):
                module.scale = 1.5
        return
    with torch.no_grad():
        if verb.how == "copy":
            model.head.load_state_dict(other.head.state_dict())
        else:
            model.head.weight.mul_(1.5)


def train(model: Any, batches: Any, task: str) -> None:
    """A loop of a user's own: one epoch of SGD."""
    loss = nn.MSELoss() if task == "numbers" else nn.CrossEntropyLoss()
    update = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        for x, y in batches:
            update.zero_grad()
            loss(model(x.clone()), y).backward()
            update.step()
    update.zero_grad()
