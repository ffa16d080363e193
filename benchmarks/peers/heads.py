"""Fifty heads on one encoder: a graph whose heads are a fleet; or fifty whole models, by a plain loop or a fleet.

A whole model has an encoder of its own, so it does more than a head of the graph: that is what sharing saves. The
check compares the graph with the undivided computation in plain torch: one encoder, and the sum of all losses.
"""

import copy
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import modelfleet as mf
from benchmarks.checking import EXACT
from benchmarks.entrants import FLEET
from benchmarks.peers import Round, compete
from benchmarks.promises import WHOLE
from modelfleet import testing

MEMBERS, BATCH, STEPS, EPOCHS = 50, 64, 16, 10
FEATURES, WIDTH, CLASSES, RATE = 64, 256, 10, 1e-3
ALONE = 5  # whole models that the plain loop trains: there, one costs the same however many follow


def encoder() -> nn.Module:
    """What the heads share."""
    return nn.Sequential(nn.Linear(FEATURES, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU())


def head() -> nn.Module:
    """What each member has of its own."""
    return nn.Sequential(nn.Linear(WIDTH, 32), nn.ReLU(), nn.Linear(32, CLASSES))


def whole() -> nn.Module:
    """A member that shares nothing."""
    return nn.Sequential(encoder(), head())


def dataset(steps: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(steps * BATCH, FEATURES, generator=generator)
    return x, torch.randint(0, CLASSES, (len(x),), generator=generator)


def train_alone(model: nn.Module, x: Tensor, y: Tensor, epochs: int) -> float:
    """Train one model, and return the mean loss of its last epoch."""
    optimizer = torch.optim.Adam(model.parameters(), lr=RATE)
    mean = 0.0
    for _ in range(epochs):
        losses = []
        for start in range(0, len(x), BATCH):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x[start : start + BATCH]), y[start : start + BATCH])
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        mean = torch.stack(losses).mean().item()
    return mean


def make_graph(first: nn.Module, heads: dict[str, nn.Module]) -> mf.Graph:
    """A graph of an encoder and a fleet of heads."""
    nodes = {"encoder": first, "heads": mf.Fleet(heads)}
    graph = mf.Graph(nodes, [("encoder", "heads")], outputs="heads", devices="cpu")
    graph.compile("adam", "cross_entropy", lr=RATE)
    return graph


def make_heads(members: int) -> dict[str, nn.Module]:
    return {f"head-{number}": head() for number in range(members)}


def difference(members: int, x: Tensor, y: Tensor) -> float:
    """The largest relative difference to the undivided computation after an epoch in float64.

    Raises:
        RuntimeError: It is too large.
    """
    x = x.double()
    ours = encoder().double(), {name: model.double() for name, model in make_heads(members).items()}
    first, others = copy.deepcopy(ours)
    make_graph(*ours).fit((x, y), epochs=1, batch_size=BATCH, shuffle=False, progress=False)
    parameters = [p for model in (first, *others.values()) for p in model.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=RATE)
    for start in range(0, len(x), BATCH):
        optimizer.zero_grad()
        features, labels = first(x[start : start + BATCH]), y[start : start + BATCH]
        torch.stack([F.cross_entropy(model(features), labels) for model in others.values()]).sum().backward()
        optimizer.step()
    pairs = [(ours[0], first), *((ours[1][name], model) for name, model in others.items())]
    worst, where = max(testing.largest_difference(own, other) for own, other in pairs)
    if not worst <= EXACT:
        raise RuntimeError(f"the graph is not the undivided computation: {where} differs by {worst:.1e}")
    return worst


def prepare(who: str, quick: bool) -> Callable[[], Round]:
    members, epochs = (4, 1) if quick else (MEMBERS, EPOCHS)
    x, y = dataset(2 if quick else STEPS)
    steps = len(x) // BATCH
    if who not in (FLEET, WHOLE):
        alone = min(members, ALONE)

        def one_by_one() -> Round:
            losses = [train_alone(whole(), x, y, 1) for _ in range(alone)]
            return Round(alone * steps, sum(losses) / alone)

        one_by_one()
        return one_by_one

    def train(trained: mf.Fleet | mf.Graph, names: list[str]) -> float:
        history = trained.fit((x, y), epochs=epochs, batch_size=BATCH, progress=False)
        return sum(history[name]["loss"][-1] for name in names) / members

    if who == WHOLE:
        fleet = mf.Fleet.build(whole, members, seed=0)
        fleet.compile("adam", "cross_entropy", lr=RATE)
        train(fleet, fleet.names)
        return lambda: Round(members * steps * epochs, train(fleet, fleet.names))

    notes = {"largest difference to the undivided computation": difference(members, x, y)}
    heads = make_heads(members)
    graph, names = make_graph(encoder(), heads), list(heads)
    train(graph, names)
    return lambda: Round(members * steps * epochs, train(graph, names), notes=notes)


if __name__ == "__main__":
    compete(prepare)
