"""Random torch models: any row of parts that keep four features, between an entry and a head."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from tests.fuzz.data import CLASSES, FEATURES, WORDS
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

KINDS = ("vector", "sequence", "tokens", "image")
WIDTH = FEATURES


@dataclass(frozen=True)
class Net:
    """A model: the names of its parts, and the seed of its weights.

    frozen: parts whose parameters take no gradient. evaluated: parts that stay in evaluation mode.
    shared: the first part is one object, frozen, for all members.
    """

    kind: str = "vector"
    parts: tuple[str, ...] = ("linear", "tanh")
    seed: int = 0
    frozen: tuple[int, ...] = ()
    evaluated: tuple[int, ...] = ()
    shared: bool = False
    training: bool = True


class Part(nn.Module):
    """A part with a layer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)


class Residual(Part):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.zeros(()))  # hides all that is behind it at first

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gate * self.layer(x)


class HiddenNorm(Part):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        nn.init.zeros_(self.norm.weight)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norm(self.layer(x).flatten(0, -2)).view_as(x)


class Norm(nn.Module):
    """BatchNorm over whatever has the features last."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH, **options)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.flatten(0, -2)).view_as(x)


class Counting(Part):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.layer(x) * (1 + 0.1 * self.calls)


class Remembering(Part):
    last: Any = None

    def forward(self, x: Tensor) -> Tensor:
        self.last = self.layer(x)
        return torch.tanh(self.last)


class Carrying(Part):
    hidden: Any = None

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        if self.hidden is not None:
            y = y + 0.5 * self.hidden
        self.hidden = y.detach().flatten(0, -2).mean(0)
        return y


class Averaging(Part):
    average: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.average.mul_(0.9).add_(0.1 * x.detach().flatten(0, -2).mean(0))
        return self.layer(x - self.average)


class Rebinding(Part):
    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        self.seen = self.seen + 0.5  # an integer becomes a float
        return self.layer(x) / (1 + 0.1 * self.seen)


class InPlace(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(1.1) if not x.requires_grad else x * 1.1


class Adding(Part):
    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        y += 1
        return y.clamp_(-2, 2)


class Branching(Part):
    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) if x.sum() > 0 else -x


class Either(Part):
    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) if x.mean() > 0 else self.other(x)


class Alternating(Part):
    """Its layer takes part in every other step only."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += self.training
        return self.layer(x) if self.calls % 2 else 1.5 * x


class Reading(Part):
    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * (1 + x.abs().mean().item())


class Selecting(Part):
    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        return y + y[x > 0].sum()


class Checkpointed(Part):
    reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(checkpoint(self.layer, x, use_reentrant=self.reentrant))


class Reentrant(Checkpointed):
    reentrant = True


class Hooked(Part):
    def __init__(self) -> None:
        super().__init__()
        self.layer.weight.register_hook(lambda gradient: 0.5 * gradient)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


class Accumulated(Hooked):
    def __init__(self) -> None:
        Part.__init__(self)

        def halve(parameter: Tensor) -> None:
            assert parameter.grad is not None
            parameter.grad.mul_(0.5)

        self.layer.weight.register_post_accumulate_grad_hook(halve)


class ForwardHook(Hooked):
    def __init__(self) -> None:
        Part.__init__(self)
        self.layer.register_forward_hook(lambda module, args, output: 2 * output)


class BackwardHook(Hooked):
    def __init__(self) -> None:
        Part.__init__(self)
        self.layer.register_full_backward_hook(lambda module, gin, gout: tuple(0.5 * g for g in gin))


class Tied(Part):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(torch.tanh(self.layer(x)), self.layer.weight.T)


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.turn = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.complex128))

    def forward(self, x: Tensor) -> Tensor:
        return (x.to(self.turn.dtype) @ self.turn).real


class Outside(Part):
    """A tensor that is neither a parameter nor a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.linspace(0.5, 1.5, WIDTH, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.table.to(x.dtype)


class Scaled(Part):
    """Has a plain attribute that its owner may change."""

    scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * self.layer(x)


class Scale(nn.Module):
    """Computes with a number of its own."""

    def __init__(self, number: float) -> None:
        super().__init__()
        self.number = number

    def forward(self, x: Tensor) -> Tensor:
        return x * self.number + (1 - self.number)


class Unused(Part):
    def __init__(self) -> None:
        super().__init__()
        self.idle = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


class Mixing(Part):
    """Rows feel each other."""

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) - x.mean(0)


class Detached(Part):
    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.layer(x).detach().sigmoid()


class Sorted(Part):
    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).sort(-1).values + F.normalize(x, dim=-1)


class Noisy(Part):
    """Draws in training: rows feel no one, but rounding to float32 would be seen."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        if not self.training:
            return y
        return y * (0.5 + torch.rand_like(y)) + 0.1 * torch.randn_like(y)


class Learnt(Part):
    """Keeps something beside its tensors."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.layer(x)

    def get_extra_state(self) -> Any:
        return {"calls": self.calls}

    def set_extra_state(self, state: Any) -> None:
        self.calls = state["calls"]


class Recurrent(nn.Module):
    def __init__(self, kind: Callable[..., nn.Module], **options: Any) -> None:
        super().__init__()
        self.inner = kind(WIDTH, WIDTH, batch_first=True, **options)

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)[0]
        return y if y.shape[-1] == WIDTH else y[..., :WIDTH] + y[..., WIDTH:]


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x, x, x, need_weights=False)[0]


class Convolution(nn.Module):
    """Over the steps of a sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.transpose(1, 2)).transpose(1, 2)


def _linear() -> nn.Module:
    return nn.Linear(WIDTH, WIDTH)


def _own(*numbers: float) -> float:
    """One of some numbers, by the seed of the net that is made: members of one fleet differ in it."""
    return numbers[torch.initial_seed() % len(numbers)]


PARTS: dict[str, Callable[[], nn.Module]] = {
    "linear": _linear,
    "tanh": nn.Tanh,
    "gelu": nn.GELU,
    "prelu": nn.PReLU,
    "layernorm": lambda: nn.LayerNorm(WIDTH),
    "norm": Norm,
    "norm, no momentum": lambda: Norm(momentum=None),
    "norm, no statistics": lambda: Norm(track_running_stats=False),
    "residual": Residual,
    "hidden norm": HiddenNorm,
    "counting": Counting,
    "remembering": Remembering,
    "carrying": Carrying,
    "averaging": Averaging,
    "rebinding": Rebinding,
    "in place": InPlace,
    "adding": Adding,
    "branching": Branching,
    "either": Either,
    "alternating": Alternating,
    "reading": Reading,
    "selecting": Selecting,
    "checkpointed": Checkpointed,
    "reentrant": Reentrant,
    "hooked": Hooked,
    "accumulated": Accumulated,
    "forward hook": ForwardHook,
    "backward hook": BackwardHook,
    "tied": Tied,
    "complex": Complex,
    "outside": Outside,
    "scaled": Scaled,
    "unused": Unused,
    "mixing": Mixing,
    "detached": Detached,
    "sorted": Sorted,
    "learnt": Learnt,
    "noisy": Noisy,
    "dropout": lambda: nn.Dropout(0.3),
    "own dropout": lambda: nn.Dropout(_own(0.3, 0.0, 0.6)),
    "own slope": lambda: nn.LeakyReLU(_own(0.01, 0.3)),
    "own scale": lambda: Scale(_own(0.5, 2.0, 1.0)),
    "own layernorm": lambda: nn.LayerNorm(WIDTH, eps=_own(1e-5, 0.1)),
    "weight norm": lambda: parametrizations.weight_norm(_linear()),
    "spectral norm": lambda: parametrizations.spectral_norm(_linear()),
}
SEQUENCE: dict[str, Callable[[], nn.Module]] = {
    "lstm": lambda: Recurrent(nn.LSTM),
    "gru": lambda: Recurrent(nn.GRU, bidirectional=True),
    "rnn": lambda: Recurrent(nn.RNN, num_layers=2),
    "attention": Attention,
    "transformer": lambda: nn.TransformerEncoderLayer(WIDTH, 2, 8, dropout=0.0, batch_first=True),
    "convolution": Convolution,
}
IMAGE: dict[str, Callable[[], nn.Module]] = {
    "conv": lambda: nn.Conv2d(WIDTH, WIDTH, 3, padding=1),
    "depthwise": lambda: nn.Conv2d(WIDTH, WIDTH, 3, padding=1, groups=WIDTH),
    "batchnorm": lambda: nn.BatchNorm2d(WIDTH),
    "groupnorm": lambda: nn.GroupNorm(2, WIDTH),
    "instancenorm": lambda: nn.InstanceNorm2d(WIDTH, affine=True, track_running_stats=True),
    "pool": lambda: nn.MaxPool2d(3, 1, 1),
    "relu": lambda: nn.ReLU(inplace=True),
    "gelu": nn.GELU,
    "in place": InPlace,
    "dropout": lambda: nn.Dropout(_own(0.2, 0.4)),
}
STATEFUL = {"counting", "remembering", "carrying", "alternating", "learnt", "rebinding"}
"""Parts that keep something in Python, which no checkpoint can have."""


class Model(nn.Module):
    """An entry, parts, and a head."""

    def __init__(self, net: Net, parts: list[nn.Module]) -> None:
        super().__init__()
        self.kind, self.names = net.kind, net.parts
        self.entry = nn.Embedding(WORDS, WIDTH) if net.kind == "tokens" else nn.Identity()
        self.parts = nn.ModuleList(parts)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.entry(x)
        for part in self.parts:
            x = part(x)
        if self.kind == "image":
            # Not all pixels alike: the mean of what an InstanceNorm gives is 0, and so would be every gradient.
            x = x.flatten(2)
            x = (x * torch.linspace(0.5, 1.5, x.shape[2], dtype=x.dtype)).mean(2)
        elif self.kind != "vector":
            x = x.mean(1)
        return self.head(x)


def table(kind: str) -> dict[str, Callable[[], nn.Module]]:
    """The parts that models of this kind can have."""
    return IMAGE if kind == "image" else PARTS if kind == "vector" else PARTS | SEQUENCE


def make(net: Net, dtype: str, trunk: dict[str, nn.Module] | None = None) -> Model:
    """A new model. `trunk` keeps what is one object for several models."""
    known = table(net.kind)
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(net.seed)
        parts = [known[name]() for name in net.parts]
        model = Model(net, parts)
        model = model.double() if dtype == "float64" else model.float()
    if net.shared and parts and trunk is not None:
        first = trunk.setdefault(f"{net.kind} {net.parts[0]}", parts[0])
        model.parts[0] = first.requires_grad_(False).eval()
    for number in net.frozen:
        if number < len(parts):
            model.parts[number].requires_grad_(False)
    if dtype == "float32":
        # Rounding would decide where an adaptive optimizer takes them, and a norm's running mean goes along.
        for name, parameter in model.named_parameters():
            if _without_effect(model, name):
                parameter.requires_grad_(False)
    model.train(net.training)
    for number in net.evaluated:
        if number < len(parts):
            model.parts[number].eval()
    if net.shared and parts:
        model.parts[0].eval()
    return model


def observe(model: nn.Module) -> dict[str, Any]:
    """All that a model holds: tensors, modes, what takes a gradient, and what its parts keep in Python."""
    found: dict[str, Any] = {
        name: tensor.detach().clone() for name, tensor in (*model.named_parameters(), *model.named_buffers())
    }
    for name, bias in found.items():
        if _without_effect(model, name):
            bias.zero_()
    for path, module in model.named_modules():
        if isinstance(module, nn.MultiheadAttention) and module.in_proj_bias is not None:
            found[f"{path}.in_proj_bias"].chunk(3)[1].zero_()  # of the keys: without effect, too
        found[f"{path} training"] = module.training
        for name in ("calls", "last", "hidden", "scale"):
            if hasattr(module, name):
                value = getattr(module, name)
                found[f"{path}.{name}"] = value.detach().clone() if isinstance(value, Tensor) else value
        hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks)
        found[f"{path} hooks"] = sum(map(len, hooks))
    for name, parameter in model.named_parameters():
        found[f"{name} requires_grad"] = parameter.requires_grad
    return found


def _without_effect(model: nn.Module, name: str) -> bool:
    """Whether a tensor is a bias that a norm takes away again.

    Its gradient is 0 but for rounding, which adaptive optimizers divide by its own size.
    """
    place = name.split(".")
    later = model.names[int(place[1]) + 1 :] if isinstance(model, Model) and place[0] == "parts" else ()
    return name.endswith("bias") and any("norm" in part for part in later)


@st.composite
def nets(draw: Callable[..., Any], kind: str, count: int, dtype: str) -> tuple[Net, ...]:
    """Nets for as many members: most of one structure."""
    double_only = {"complex", "noisy"}
    names = sorted(set(table(kind)) - (double_only if dtype != "float64" else set()))
    parts = tuple(draw(st.lists(st.sampled_from(names), min_size=0, max_size=3)))
    odd = st.lists(st.integers(0, 2), max_size=1).map(tuple)
    frozen, evaluated = draw(odd), draw(odd)
    shared = draw(st.sampled_from([False, False, False, True])) and bool(parts) and not {*parts[:1]} & STATEFUL
    # What is shared stays in evaluation; `train()` of one member would change that for all.
    training = draw(st.sampled_from([True, True, True, False])) or shared
    first = Net(kind, parts, 0, frozen, evaluated, shared, training)
    found = [first]
    for number in range(1, count):
        if draw(st.integers(0, 3)):
            found.append(Net(kind, parts, number, frozen, evaluated, shared, training))
        else:
            other = tuple(draw(st.lists(st.sampled_from(names), min_size=0, max_size=2)))
            found.append(Net(kind, other, number))
    return tuple(found)


def stateful(net: Net) -> bool:
    """Whether a model keeps something in Python."""
    return bool(STATEFUL & {*net.parts})
