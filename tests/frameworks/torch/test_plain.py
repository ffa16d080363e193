"""A member that is not fused runs as plain torch: compared with loops that share no code with the library."""

import copy
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import modelfleet as mf
from modelfleet.frameworks.torch.tracing.trace import trace
from modelfleet.testing.torch import OPTIMIZERS
from modelfleet.types import Strategy

RANDOM = np.random.default_rng(0)
X, Y = torch.from_numpy(RANDOM.standard_normal((24, 6))), torch.from_numpy(RANDOM.standard_normal((24, 2)))
CLASSES = {name: kind for name, kind in OPTIMIZERS.items() if name != "lion"}


def mse(model: nn.Module, batch: Any) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


def loop(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    objective: Callable[..., Tensor] = mse,
    *,
    epochs: int = 2,
    size: int = 8,
) -> list[float]:
    """What a person would write; gives the mean loss of every epoch."""
    model.train()
    means = []
    for _ in range(epochs):
        losses = []
        for start in range(0, len(X), size):
            optimizer.zero_grad()
            loss = objective(model, (X[start : start + size].clone(), Y[start : start + size].clone()))
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        means.append(float(np.mean(losses)))
    return means


def trained(
    models: Sequence[nn.Module],
    objective: Any = None,
    *,
    optimizer: str = "adam",
    strategy: Strategy = "auto",
    **hyper: Any,
) -> tuple[mf.Fleet, mf.History]:
    fleet = mf.Fleet(models)
    loss = None if objective is not None else "mse"
    fleet.compile(optimizer, loss, objective=objective, lr=1e-2, **hyper)
    history = fleet.fit((X, Y), epochs=2, batch_size=8, shuffle=False, progress=False, strategy=strategy)
    assert not history.failed, history.failed
    return fleet, history


def same(model: nn.Module, expected: nn.Module, most: float = 1e-12) -> None:
    state, other = model.state_dict(), expected.state_dict()
    assert state.keys() == other.keys()
    for name, tensor in state.items():
        assert tensor.dtype == other[name].dtype
        torch.testing.assert_close(tensor, other[name], rtol=most, atol=most)


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2)).double()


class Branching(nn.Module):
    """Can't be fused: what it does depends on a value."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) if x.sum() > 0 else self.inner(-x)


@pytest.mark.parametrize("name", CLASSES)
def test_every_optimizer_takes_torch_s_own_steps(name: str) -> None:
    model = mlp()
    expected = copy.deepcopy(model)
    trained([model], optimizer=name, weight_decay=0.1)
    # Of torch's ways to take the step, the quickest one on the CPU.
    fused = {"fused": True} if name in ("adam", "adamw") else {}
    loop(expected, CLASSES[name](expected.parameters(), lr=1e-2, weight_decay=0.1, **fused))
    same(model, expected, 0.0)


@pytest.mark.parametrize("name", ["adam", "adamw"])
@pytest.mark.parametrize("of", ["weights", "gradients"])
def test_weights_and_gradients_of_any_layout_take_torch_s_steps(name: str, of: str) -> None:
    """torch's fused update takes memory as it comes, and would mix up the numbers of another layout."""
    model = mlp()
    first: Any = model[0]
    if of == "weights":
        first.weight = nn.Parameter(first.weight.detach().t().contiguous().t())
    expected = copy.deepcopy(model)
    if of == "gradients":
        first.weight.register_post_accumulate_grad_hook(in_columns)
    trained([model], optimizer=name, weight_decay=0.1)
    loop(expected, CLASSES[name](expected.parameters(), lr=1e-2, weight_decay=0.1))
    same(model, expected)


def in_columns(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad = parameter.grad.t().contiguous().t()


def test_an_unused_parameter_takes_no_fused_step() -> None:
    model = nn.Sequential(nn.Linear(6, 2), nn.Linear(2, 2)).double()
    expected = copy.deepcopy(model)
    seen: list[int] = []

    def some(model: nn.Module, batch: Any) -> Tensor:
        """Leave out the second layer in every other step."""
        assert isinstance(model, nn.Sequential)
        seen.append(0)
        output = model[0](batch[0])
        return F.mse_loss(output if len(seen) % 2 else model[1](output), batch[1])

    trained([model], some, optimizer="adamw", weight_decay=0.1)
    steps = len(seen)
    seen.clear()
    loop(expected, torch.optim.AdamW(expected.parameters(), lr=1e-2, weight_decay=0.1), some)
    assert steps == len(seen)
    same(model, expected)


@pytest.mark.parametrize("name", [*CLASSES, "lion"])
def test_optimizer_state_goes_from_plain_to_fused_and_back(name: str) -> None:
    """Three fits in three arrangements are one run."""
    models = [mlp(), mlp()]
    expected = [copy.deepcopy(model) for model in models]
    extra: dict[str, Any] = {"momentum": 0.9, "dampening": 0.5} if name == "sgd" else {}
    fleet, whole = mf.Fleet(models), mf.Fleet(expected)
    for one in (fleet, whole):
        one.compile(name, "mse", lr=1e-2, **extra)
    for strategy in ("interleaved", "fused", "interleaved"):
        fleet.fit((X, Y), batch_size=8, shuffle=False, progress=False, strategy=strategy)
    if name == "lion":
        whole.fit((X, Y), batch_size=8, epochs=3, shuffle=False, progress=False, strategy="fused")
    for model, other in zip(models, expected, strict=True):
        if name != "lion":
            loop(other, CLASSES[name](other.parameters(), lr=1e-2, **extra), epochs=3)
        same(model, other, 1e-10)


@pytest.mark.parametrize("strategy", ["interleaved", "fused"])
def test_a_parameter_that_rests_for_a_fit_keeps_its_optimizer_state(strategy: Strategy) -> None:
    models = [mlp(), mlp()]
    expected = [copy.deepcopy(model) for model in models]
    fleet = mf.Fleet(models)
    fleet.compile("adam", "mse", lr=1e-2)
    for frozen in (False, True, False):
        for model in models:
            model[0].requires_grad_(not frozen)
        fleet.fit((X, Y), batch_size=8, shuffle=False, progress=False, strategy=strategy)
    for model, other in zip(models, expected, strict=True):
        optimizer = torch.optim.Adam(other.parameters(), lr=1e-2)
        for frozen in (False, True, False):
            other[0].requires_grad_(not frozen)
            loop(other, optimizer, epochs=1)
        same(model, other)


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 5).double(), nn.Linear(5, 2).double()
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        hidden: Any = checkpoint(
            lambda x: torch.tanh(self.first(x)), x.requires_grad_(), use_reentrant=self.reentrant
        )
        return self.second(hidden)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("members", [1, 2])
def test_activations_are_recomputed_with_the_weights_of_their_own_member(reentrant: bool, members: int) -> None:
    models = [Checkpointed(reentrant) for _ in range(members)]
    expected = [copy.deepcopy(model) for model in models]
    trained(models)
    for model, other in zip(models, expected, strict=True):
        loop(other, torch.optim.Adam(other.parameters(), lr=1e-2))
        same(model, other)


def test_hooks_of_parameters_run() -> None:
    models = [mlp(), mlp()]
    expected = [copy.deepcopy(model) for model in models]
    stepped: list[nn.Parameter] = []
    for model in (*models, *expected):
        parameters = list(model.parameters())
        parameters[0].register_hook(lambda gradient: gradient * 0.5)
        parameters[3].register_post_accumulate_grad_hook(stepped.append)
    trained(models)
    for model, other in zip(models, expected, strict=True):
        loop(other, torch.optim.Adam(other.parameters(), lr=1e-2))
        same(model, other)
        assert sum(p is model[2].bias for p in stepped) == 6


def test_what_was_refused_once_is_refused_again_when_a_member_joins() -> None:
    models = [mlp(), mlp()]
    expected = [copy.deepcopy(model) for model in models]
    for model in (*models, *expected):
        next(model.parameters()).register_hook(lambda gradient: gradient * 0.5)
    fleet, _ = trained(models)
    fleet.add("joined", mlp())
    fleet.compile("adam", "mse", lr=1e-2, members=["joined"])
    fleet.fit((X, Y), batch_size=8, shuffle=False, epochs=2, progress=False)
    for model, other in zip(models, expected, strict=True):
        optimizer = torch.optim.Adam(other.parameters(), lr=1e-2)
        for _ in range(2):
            loop(other, optimizer)
        same(model, other)


class Remembering(nn.Module):
    """Keeps a hidden state of its own from batch to batch, and counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 2).double()
        self.hidden: Tensor | None = None
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        out = self.layer(x)
        if self.hidden is not None:
            out = out + 0.5 * self.hidden
        self.hidden = out.detach().mean(0)
        self.calls += 1
        return out / self.calls


@pytest.mark.parametrize("strategy", ["auto", "interleaved", "threads"])
def test_what_a_model_remembers_is_its_own_and_moves_on_as_in_a_loop(strategy: Strategy) -> None:
    models = [Remembering() for _ in range(3)]
    expected = [copy.deepcopy(model) for model in models]
    _, history = trained(models, strategy=strategy)
    for number, (model, other) in enumerate(zip(models, expected, strict=True)):
        losses = loop(other, torch.optim.Adam(other.parameters(), lr=1e-2))
        same(model, other)
        assert model.calls == other.calls == 6
        torch.testing.assert_close(model.hidden, other.hidden)
        np.testing.assert_allclose(history[str(number)]["loss"], losses, rtol=1e-12)


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 2).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.mul_(2.0))


@pytest.mark.parametrize("members", [1, 3])
def test_a_forward_that_writes_into_its_input_touches_nobody_s_data(members: int) -> None:
    models = [InPlace() for _ in range(members)]
    expected = [copy.deepcopy(model) for model in models]
    x = X.clone()
    fleet = mf.Fleet(models)
    fleet.compile("adam", "mse", lr=1e-2)
    before = fleet.predict(x, batch_size=8)
    fleet.fit((x, Y), epochs=2, batch_size=8, shuffle=False, progress=False)
    loss = fleet.evaluate((x, Y), batch_size=8)
    assert torch.equal(x, X)
    for number, other in enumerate(expected):
        with torch.no_grad():
            np.testing.assert_allclose(before[str(number)], other(X.clone()).numpy(), rtol=1e-12)
        loop(other, torch.optim.Adam(other.parameters(), lr=1e-2))
        same(models[number], other)
        with torch.no_grad():
            assert abs(loss[str(number)]["loss"] - mse(other, (X.clone(), Y)).item()) < 1e-12


def penalty(model: nn.Module, batch: Any) -> Tensor:
    """A gradient penalty, as physics-informed networks and critics have them."""
    x = batch[0].detach().requires_grad_()
    out = model(x)
    (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    return F.mse_loss(out, batch[1]) + 0.1 * slope.square().mean()


def flattened(model: nn.Module, batch: Any) -> Tensor:
    """All that an objective may do with parameters."""
    assert all(isinstance(p, nn.Parameter) for p in model.parameters())
    trained = [p for p in model.parameters() if p.requires_grad]
    decay = sum((p.view(-1) ** 2).sum() for p in trained)
    return mse(model, batch) + 0.01 * decay + 0.01 * nn.utils.parameters_to_vector(trained).abs().mean()


@pytest.mark.parametrize("objective", [penalty, flattened])
def test_an_objective_may_do_what_it_may_in_a_loop(objective: Callable[..., Tensor]) -> None:
    models = [mlp(), mlp()]
    expected = [copy.deepcopy(model) for model in models]
    for model in (*models, *expected):
        model[0].bias.requires_grad_(False)
    fleet, _ = trained(models, objective)
    found = fleet.evaluate((X, Y), batch_size=24)
    for number, other in enumerate(expected):
        loop(other, torch.optim.Adam(other.parameters(), lr=1e-2), objective)
        same(models[number], other)
        other.eval()
        assert abs(found[str(number)]["loss"] - objective(other, (X, Y)).item()) < 1e-12


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 2, dtype=torch.complex128))

    def forward(self, x: Tensor) -> Tensor:
        return (x.to(torch.complex128) @ self.weight).abs()


@pytest.mark.parametrize("name", ["sgd", "adam", "adagrad", "rmsprop"])
@pytest.mark.parametrize("members", [1, 2])
def test_complex_parameters_are_trained(name: str, members: int) -> None:
    models = [Complex() for _ in range(members)]
    expected = [copy.deepcopy(model) for model in models]
    trained(models, optimizer=name)
    for model, other in zip(models, expected, strict=True):
        loop(other, CLASSES[name](other.parameters(), lr=1e-2))
        same(model, other)


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 2, sparse=True).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.table((x[:, 0].abs() * 2).long().clamp(max=6))


@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")  # torch's own
@pytest.mark.parametrize("members", [1, 2])
def test_sparse_gradients_are_taken_where_torch_takes_them(members: int) -> None:
    models = [Sparse() for _ in range(members)]
    expected = [copy.deepcopy(model) for model in models]
    trained(models, optimizer="adagrad")
    for model, other in zip(models, expected, strict=True):
        loop(other, torch.optim.Adagrad(other.parameters(), lr=1e-2))
        same(model, other)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*torch.jit:FutureWarning")
def test_scripted_models_are_trained() -> None:
    expected = [mlp(), mlp()]
    models = [torch.jit.script(copy.deepcopy(model)) for model in expected]
    trained(models)
    for model, other in zip(models, expected, strict=True):
        loop(other, torch.optim.Adam(other.parameters(), lr=1e-2))
        same(model, other)


def test_after_a_loss_that_is_not_finite_the_buffers_are_the_last_good_ones() -> None:
    model = Branching(nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 2)).double())
    expected = copy.deepcopy(model)
    x = X.clone()
    x[16:] = torch.nan
    fleet = mf.Fleet([model])
    fleet.compile("sgd", "mse", lr=1e-2)
    with pytest.raises(mf.AllFailedError, match=r"loss became NaN .* It was the only member"):
        fleet.fit((x, Y), batch_size=8, shuffle=False, progress=False)
    optimizer = torch.optim.SGD(expected.parameters(), lr=1e-2)
    for start in (0, 8):
        optimizer.zero_grad()
        mse(expected, (X[start : start + 8], Y[start : start + 8])).backward()
        optimizer.step()
    same(model, expected)


def test_nothing_is_left_in_a_model() -> None:
    model = Branching(mlp()).eval()
    before = {path: set(vars(module)) for path, module in model.named_modules()}
    fleet, _ = trained([model])
    fleet.evaluate((X, Y))
    fleet.predict(X)
    assert {path: set(vars(module)) for path, module in model.named_modules()} == before
    assert not any(module.training for module in model.modules())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


class Moody(nn.Module):
    """Branches on a value, but for long rows only."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2).double()

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1] > 4 and x.sum() > 0:
            x = -x
        return self.layer(x).mean(1)


def test_a_later_batch_that_cannot_be_fused_is_trained_one_by_one() -> None:
    batches = [
        (X[i : i + 4, :3].unsqueeze(1).expand(-1, n, -1).contiguous(), Y[i : i + 4])
        for i, n in ((0, 2), (4, 6), (8, 3))
    ]
    models = [Moody() for _ in range(3)]
    expected = [copy.deepcopy(model) for model in models]
    fleet = mf.Fleet(models)
    fleet.compile("adam", "mse", lr=1e-2)
    history = fleet.fit(batches, validation=batches[::-1], epochs=2, progress=False)
    assert not history.failed
    assert len(fleet.plan().lanes) == 1
    for number, other in enumerate(expected):
        optimizer = torch.optim.Adam(other.parameters(), lr=1e-2)
        for batch in (*batches, *batches):
            optimizer.zero_grad()
            mse(other, batch).backward()
            optimizer.step()
        same(models[number], other)
        loss = np.mean([mse(other, batch).item() for batch in batches])
        assert abs(history[str(number)]["val_loss"][-1] - loss) < 1e-12


class Looking(nn.Module):
    """Counts its calls in a buffer, in evaluation mode as well."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 2).double()
        self.register_buffer("calls", torch.zeros((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.layer(x) / self.calls


def test_buffers_that_evaluating_changes_are_changed() -> None:
    models = [Looking() for _ in range(2)]
    fleet = mf.Fleet(models)
    fleet.compile("sgd", "mse", lr=1e-2)
    fleet.predict(X, batch_size=8)
    assert [model.calls.item() for model in models] == [3, 3]
    fleet.evaluate((X, Y), batch_size=8)
    assert [model.calls.item() for model in models] == [6, 6]
    history = fleet.fit((X, Y), validation=(X, Y), epochs=2, batch_size=8, shuffle=False, progress=False)
    assert [model.calls.item() for model in models] == [18, 18]
    expected = Looking()
    expected.load_state_dict(models[0].state_dict())
    expected.calls -= 3  # as it was before the last validation
    losses = [mse(expected, (X[i : i + 8], Y[i : i + 8])).item() for i in (0, 8, 16)]
    assert abs(history["0"]["val_loss"][-1] - np.mean(losses)) < 1e-12


@pytest.mark.parametrize("strategy", ["interleaved", "fused"])
def test_a_layer_that_is_put_in_another_s_place_begins_with_fresh_optimizer_state(strategy: Strategy) -> None:
    models = [mlp(), mlp()]
    heads = [nn.Linear(5, 2).double() for _ in models]
    expected = [copy.deepcopy(model) for model in models]
    spares = [copy.deepcopy(head) for head in heads]
    fleet = mf.Fleet(models)
    fleet.compile("adam", "mse", lr=1e-2)
    fleet.fit((X, Y), batch_size=8, shuffle=False, progress=False, strategy=strategy)
    for model, head in zip(models, heads, strict=True):
        model[2] = head
    fleet.fit((X, Y), batch_size=8, shuffle=False, progress=False, strategy=strategy)
    for model, other, head in zip(models, expected, spares, strict=True):
        optimizer = torch.optim.Adam(other.parameters(), lr=1e-2)
        loop(other, optimizer, epochs=1)
        other[2] = head
        optimizer.param_groups[0]["params"] = list(other.parameters())
        loop(other, optimizer, epochs=1)
        same(model, other)


class Shadow(nn.Module):
    """Has a buffer that is a view of its weight."""

    shadow: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 2).double()
        self.register_buffer("shadow", self.layer.weight.detach()[0], persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.shadow.sum()


def test_a_buffer_that_shares_memory_with_a_weight_follows_it() -> None:
    models = [Shadow() for _ in range(2)]
    expected = []
    for model in models:
        other = Shadow()
        with torch.no_grad():
            for mine, theirs in zip(other.parameters(), model.parameters(), strict=True):
                mine.copy_(theirs)
        expected.append(other)
    fleet, _ = trained(models)
    assert "shares memory" in fleet.plan((X, Y)).lanes[0].reason
    for model, other in zip(models, expected, strict=True):
        loop(other, torch.optim.Adam(other.parameters(), lr=1e-2))
        same(model, other)
        assert torch.equal(model.shadow, model.layer.weight[0])


class WholeDict(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 2).double()

    def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        return self.layer(inputs["a"] * inputs["b"])


class WholePair(WholeDict):
    def forward(self, inputs: Any) -> Tensor:
        first, second = inputs
        return self.layer(first * second)


@pytest.mark.parametrize("kind", [WholeDict, WholePair])
def test_a_forward_that_takes_one_dict_or_tuple_gets_it_whole(kind: type[WholeDict]) -> None:
    models = [kind() for _ in range(2)]
    expected = [copy.deepcopy(model) for model in models]
    x: Any = {"a": X, "b": X} if kind is WholeDict else (X, X)
    fleet = mf.Fleet(models)
    fleet.compile("sgd", "mse", lr=1e-2)
    fleet.fit((x, Y), batch_size=24, shuffle=False, progress=False)
    for model, other in zip(models, expected, strict=True):
        optimizer = torch.optim.SGD(other.parameters(), lr=1e-2)
        F.mse_loss(other(x), Y).backward()
        optimizer.step()
        same(model, other)


class Pair(nn.Module):
    """Has no forward: an objective calls its parts."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(6, 2).double(), nn.Linear(6, 2).double()


def test_an_objective_need_not_call_the_model_on_x() -> None:
    def both(model: Any, batch: Any) -> Tensor:
        return F.mse_loss(model.one(batch[0]) + model.two(batch[0]), batch[1])

    models = [Pair() for _ in range(2)]
    expected = [copy.deepcopy(model) for model in models]
    trained(models, both)
    for model, other in zip(models, expected, strict=True):
        loop(other, torch.optim.Adam(other.parameters(), lr=1e-2), both)
        same(model, other)


@pytest.mark.parametrize("strategy", ["fused", "interleaved", "threads"])
def test_on_step_end_comes_once_for_every_step_of_all_members(strategy: Strategy) -> None:
    class Steps(mf.Callback):
        def __init__(self) -> None:
            self.seen: list[int] = []

        def on_step_end(self, run: Any) -> None:
            self.seen.append(run.step)

    steps = Steps()
    fleet = mf.Fleet([mlp(), mlp()])
    fleet.compile("sgd", "mse", lr=1e-2)
    fleet.fit((X, Y), batch_size=8, epochs=2, progress=False, strategy=strategy, callbacks=[steps])
    assert steps.seen == [1, 2, 3, 4, 5, 6]


def test_a_frozen_teacher_with_batch_norm_does_not_keep_members_apart() -> None:
    teacher = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).double().eval()

    def distill(model: nn.Module, batch: Any) -> Tensor:
        with torch.no_grad():
            target = teacher(batch[0])
        return F.mse_loss(model(batch[0]), target)

    models = [mlp(), mlp()]
    expected = [copy.deepcopy(model) for model in models]
    fleet, _ = trained(models, distill)
    assert len(fleet.plan((X, Y)).lanes) == 1
    for model, other in zip(models, expected, strict=True):
        loop(other, torch.optim.Adam(other.parameters(), lr=1e-2), distill)
        same(model, other)


class Raising(nn.Module):
    def __init__(self, error: type[Exception]) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 2).double()
        self.error = error
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
            if self.calls == 5:
                raise self.error("no")
        return self.layer(x)


@pytest.mark.parametrize("error", [ValueError, MemoryError])
def test_a_member_that_raises_keeps_the_steps_before_and_says_which_it_was(error: type[Exception]) -> None:
    model = Raising(error)
    expected = copy.deepcopy(model.layer)
    fleet = mf.Fleet([model, mlp()])
    fleet.compile("sgd", "mse", lr=1e-2)
    history = fleet.fit((X, Y), batch_size=4, shuffle=False, progress=False)
    assert history.failed["0"].step == 5
    optimizer = torch.optim.SGD(expected.parameters(), lr=1e-2)
    for start in range(0, 16, 4):
        optimizer.zero_grad()
        mse(expected, (X[start : start + 4], Y[start : start + 4])).backward()
        optimizer.step()
    same(model.layer, expected)


@pytest.mark.parametrize("strategy", ["fused", "interleaved", "threads"])
@pytest.mark.parametrize(
    "context",
    [torch.no_grad, torch.inference_mode, lambda: torch.autocast("cpu", torch.bfloat16)],
    ids=["no_grad", "inference", "autocast"],
)
def test_contexts_around_a_verb_change_nothing(context: Callable[[], Any], strategy: Strategy) -> None:
    models = [mlp(), mlp()]
    expected = [copy.deepcopy(model) for model in models]
    fleet = mf.Fleet(models)
    fleet.compile("adam", "mse", lr=1e-2)
    with context():
        fleet.fit((X, Y), epochs=2, batch_size=8, shuffle=False, progress=False, strategy=strategy)
        outputs = fleet.predict(X)
    for number, other in enumerate(expected):
        loop(other, torch.optim.Adam(other.parameters(), lr=1e-2))
        same(models[number], other)
        with torch.no_grad():
            np.testing.assert_allclose(outputs[str(number)], other(X).numpy(), rtol=1e-10)


class Freezing(mf.Callback):
    def on_epoch_end(self, run: Any) -> None:
        for name in run.fleet.names:
            run.sync(name)[0].requires_grad_(run.epoch % 2 == 0)
            run.take(name)


def test_freezing_in_a_callback_is_done_or_refused() -> None:
    model = mlp()
    expected = copy.deepcopy(model)
    alone = mf.Fleet([model])
    alone.compile("adam", "mse", lr=1e-2)
    alone.fit((X, Y), epochs=3, batch_size=8, shuffle=False, progress=False, callbacks=[Freezing()])
    optimizer = torch.optim.Adam(expected.parameters(), lr=1e-2)
    for trained in (True, False, True):
        expected[0].requires_grad_(trained)
        loop(expected, optimizer, epochs=1)
    same(model, expected)
    fleet = mf.Fleet([mlp(), mlp()])
    fleet.compile("adam", "mse", lr=1e-2)
    with pytest.raises(mf.StrategyError, match=r"was frozen or unfrozen in the middle of a fit"):
        fleet.fit((X, Y), epochs=3, batch_size=8, progress=False, callbacks=[Freezing()])


class OfEight(nn.Module):
    """Takes batches of eight rows only."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 2).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.view(8, 6))


def test_a_model_for_batches_of_one_size_is_trained() -> None:
    models = [OfEight(), OfEight()]
    expected = [copy.deepcopy(model) for model in models]
    trained(models)
    for model, other in zip(models, expected, strict=True):
        loop(other, torch.optim.Adam(other.parameters(), lr=1e-2))
        same(model, other)


class Annealed:
    """An objective that counts its own calls."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        self.calls += 1
        return mse(model, batch) / self.calls


def test_members_that_share_what_their_objective_changes_are_told() -> None:
    fleet = mf.Fleet([mlp(), mlp()])
    fleet.compile("adam", objective=Annealed(), lr=1e-2)
    with pytest.warns(mf.FleetWarning, match=r"'0' and '1' take turns and share state that they change"):
        fleet.fit((X, Y), batch_size=8, progress=False)
    models = [mlp(), mlp()]
    expected = [copy.deepcopy(model) for model in models]
    own = mf.Fleet(models)
    for name in own.names:
        own.compile("adam", objective=Annealed(), lr=1e-2, members=[name])
    own.fit((X, Y), batch_size=8, shuffle=False, progress=False)
    for model, other in zip(models, expected, strict=True):
        loop(other, torch.optim.Adam(other.parameters(), lr=1e-2), Annealed(), epochs=1)
        same(model, other)


class Slope(nn.Module):
    """Gives the slope of its own energy, as force fields do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 2).double()

    def forward(self, x: Tensor) -> Tensor:
        x = x.requires_grad_()
        (slope,) = torch.autograd.grad(self.layer(x).square().sum(), x, create_graph=True)
        return slope[:, :2]


@pytest.mark.parametrize("strategy", ["auto", "interleaved"])
def test_a_forward_may_differentiate_by_its_input(strategy: Strategy) -> None:
    models = [Slope(), Slope()]
    expected = [copy.deepcopy(model) for model in models]
    fleet, _ = trained(models, strategy=strategy)
    outputs = fleet.predict(X, batch_size=24)
    for number, other in enumerate(expected):
        loop(other, torch.optim.Adam(other.parameters(), lr=1e-2))
        same(models[number], other)
        np.testing.assert_allclose(outputs[str(number)], other(X.clone()).detach().numpy(), rtol=1e-10)


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 2).double()

    def forward(self, x: Tensor) -> dict[str, Any]:
        out = self.layer(x)
        return {"out": out, "pair": (out + 1, {"deep": out + 2})}


@pytest.mark.parametrize("members", [1, 2])
def test_predict_keeps_what_is_nested_in_an_output(members: int) -> None:
    fleet = mf.Fleet([Nested() for _ in range(members)])
    found = fleet.predict(X, batch_size=8)["0"]
    np.testing.assert_allclose(found["pair"][0], found["out"] + 1)
    np.testing.assert_allclose(found["pair"][1]["deep"], found["out"] + 2)


def test_a_trace_in_one_thread_is_not_seen_in_another() -> None:
    """torch's optimizers round otherwise while something is compiled."""
    seen: list[bool] = []

    def step(x: Tensor) -> Tensor:
        seen.append(bool(torch.compiler.is_compiling()))
        thread = threading.Thread(target=lambda: seen.append(bool(torch.compiler.is_compiling())))
        thread.start()
        thread.join()
        return x + 1

    trace(step, (X,), [False])
    assert seen == [True, False]
