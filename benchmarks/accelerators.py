"""python -m benchmarks.accelerators [row ...] [--device cuda:0] [--quick]: fused fleets on a GPU, and their peers.

Prints the table for the README. All peers run in this process and take turns, on one device: torch one by one,
`torch.func` by hand, and `jax.vmap` by hand where JAX sees the GPU. A step is one of all members. The data are on
the device, and a round ends when the host has read the losses.
"""

import argparse
import os
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, stack_module_state, vmap

import modelfleet as mf
from benchmarks.nets import make_net
from benchmarks.peers import Round
from benchmarks.peers.torch_loop import train_all, trainees
from benchmarks.rows import ROWS, Row, datasets

ROUNDS = 5
NAMES = ("mlp-64", "mlp-2000", "mlp-wide", "cnn", "transformer", "lstm")
Peer = Callable[[Row, str], Callable[[], Round]]
"""Builds and warms everything for a row on a device, and returns what trains one round."""


class CannotRunError(Exception):
    """A peer can't train a row here. The message says why."""


class ByHand:
    """Members stacked and stepped by `torch.func`, with Adam written out: what one writes without a library."""

    def __init__(self, models: Sequence[nn.Module], rates: Tensor) -> None:
        self.params, buffers = stack_module_state(list(models))
        self.params = {name: tensor.detach() for name, tensor in self.params.items()}
        self._first = {name: torch.zeros_like(tensor) for name, tensor in self.params.items()}
        self._second = {name: torch.zeros_like(tensor) for name, tensor in self.params.items()}
        self._rates, self._count = rates, 0
        one = models[0]

        def loss(params: dict[str, Tensor], buffers: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
            return F.cross_entropy(functional_call(one, (params, buffers), (x,)), y)

        self._gradients = vmap(grad_and_value(loss), (0, 0, 0, 0))
        self._buffers = buffers

    @torch.no_grad()
    def step(self, x: Tensor, y: Tensor) -> Tensor:
        """Take one step of every member on its own rows, `(member, row, …)`. Return the losses `(member,)`."""
        gradients, losses = self._gradients(self.params, self._buffers, x, y)
        self._count += 1
        scale = self._rates / (1 - 0.9**self._count)
        root = (1 - 0.999**self._count) ** -0.5
        for name, gradient in gradients.items():
            first = self._first[name].mul_(0.9).add_(gradient, alpha=0.1)
            second = self._second[name].mul_(0.999).addcmul_(gradient, gradient, value=0.001)
            rate = scale.view(-1, *[1] * (gradient.dim() - 1))
            self.params[name] -= rate * first / (second.sqrt() * root + 1e-8)
        return losses


def fleet(row: Row, device: str) -> Callable[[], Round]:
    """modelfleet: one fleet, one `fit`."""
    data = datasets(row)
    given = mf.each(data) if row.own_data else data[0]
    made = mf.Fleet.build(partial(make_net, row), row.members, seed=0, devices=device)
    made.compile("adam", "cross_entropy", lr=mf.each(row.rates().tolist()))

    def train_round() -> Round:
        history = made.fit(given, epochs=row.epochs, batch_size=row.batch, strategy="fused", progress=False)
        losses = [history[name]["loss"][-1] for name in made.names]
        return Round(row.members * row.steps * row.epochs, sum(losses) / len(losses))

    return train_round


def one_by_one(row: Row, device: str) -> Callable[[], Round]:
    """Train by torch, one member after the other: some members, since the others take as long."""
    members = trainees(row, range(row.alone), device=device)
    return lambda: train_all(row, members)


def by_hand(row: Row, device: str) -> Callable[[], Round]:
    """Train by `torch.func`, all members at once."""
    if row.net == "lstm":
        raise CannotRunError("torch.func can't map `nn.LSTM`")
    xs, ys = zip(*datasets(row), strict=True)
    x, y = (torch.stack([torch.from_numpy(one) for one in own]).to(device) for own in (xs, ys))
    torch.manual_seed(0)
    models = [make_net(row).to(device) for _ in range(row.members)]
    hand = ByHand(models, torch.from_numpy(row.rates()).to(device))
    own = torch.arange(row.members if row.own_data else 1, device=device).unsqueeze(1)

    def train_round() -> Round:
        losses = torch.zeros((), device=device)
        for _ in range(row.epochs):
            order = torch.rand(row.members, row.examples, device=device).argsort(1)
            losses = torch.stack([hand.step(x[own, r], y[own, r]) for r in order.split(row.batch, 1)])
        return Round(row.members * row.steps * row.epochs, losses.mean().item())

    return train_round


def by_jax(row: Row, device: str) -> Callable[[], Round]:
    """Train by `jax.vmap` and `jax.jit`, where JAX has a device of this kind."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # or JAX takes most of the GPU's memory
    try:
        import jax
    except ImportError:
        raise CannotRunError("JAX is not installed") from None
    wanted = "cpu" if device.startswith("cpu") else "gpu"
    if jax.default_backend() != wanted:
        raise CannotRunError(f"JAX sees no {wanted.upper()}")
    from benchmarks.peers.jax_vmap import trainer

    return trainer(row)


PEERS: dict[str, Peer] = {
    "modelfleet": fleet,
    "torch one by one": one_by_one,
    "torch.func by hand": by_hand,
    "jax.vmap by hand": by_jax,
}


def measure(row: Row, device: str, rounds: int) -> tuple[dict[str, float], dict[str, str]]:
    """Return the milliseconds of a step of all members, by peer, and why the other peers have none."""
    ready: dict[str, Callable[[], Round]] = {}
    problems: dict[str, str] = {}
    for name, peer in PEERS.items():
        try:
            ready[name] = peer(row, device)
            ready[name]()  # what is traced, compiled or tuned comes first
        except CannotRunError as error:
            problems[name] = str(error)
    best = dict.fromkeys(ready, float("inf"))
    for _ in range(rounds):
        for name, train_round in ready.items():
            begun = time.perf_counter()
            done = train_round()
            best[name] = min(best[name], (time.perf_counter() - begun) / done.member_steps)
    return {name: 1000 * row.members * seconds for name, seconds in best.items()}, problems


def table(measured: Iterable[tuple[Row, dict[str, float], dict[str, str]]], title: str) -> str:
    """Return the table in Markdown, and below it why some of its cells are empty."""
    lines = [f"| {title} | {' | '.join(PEERS)} |", f"|---|{'---|' * len(PEERS)}"]
    reasons: dict[str, None] = {}
    for row, found, problems in measured:
        cells = [f"{found[name]:.3g}" if name in found else "–" for name in PEERS]
        lines.append(f"| {row.title} | {' | '.join(cells)} |")
        reasons |= dict.fromkeys(f"– {name}: {why}." for name, why in problems.items())
    return "\n".join([*lines, *(["", *reasons] if reasons else [])])


def main(words: Sequence[str] | None = None) -> None:
    """Measure the rows that are named, and print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.accelerators", description=__doc__)
    parser.add_argument("rows", nargs="*", metavar="row", help=f"of {', '.join(NAMES)}; all if none is named")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--quick", action="store_true", help="a smoke test with tiny counts")
    arguments = parser.parse_args(words)
    if strangers := [name for name in arguments.rows if name not in NAMES]:
        parser.error(f"unknown row {', '.join(strangers)}. Known: {', '.join(NAMES)}.")
    kind = torch.device(arguments.device).type
    if kind == "cuda" and not torch.cuda.is_available():
        parser.error("torch sees no CUDA device here. Name another with --device, such as cpu.")
    if not arguments.quick:
        os.environ.setdefault("MODELFLEET_COMPILE", "now")  # steady state is measured
    model = torch.cuda.get_device_name(arguments.device) if kind == "cuda" else kind
    rows = [ROWS[name].quick() if arguments.quick else ROWS[name] for name in arguments.rows or NAMES]
    found = [(row, *measure(row, arguments.device, 1 if arguments.quick else ROUNDS)) for row in rows]
    print(table(found, f"ms for a step of all members, {model}, torch {torch.__version__}"))


if __name__ == "__main__":
    main()
