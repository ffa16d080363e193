"""A node of a graph may be a fleet: many heads on one encoder, each with its own optimizer, loss and streams."""

import copy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import modelfleet as mf

NAMES = [f"m{number:02}" for number in range(4)]
RATES = [1e-3, 3e-3, 1e-2, 3e-2]
ROWS, BATCH, EPOCHS = 40, 8, 4  # 20 steps
EXACT = 1e-10
Heads = dict[str, nn.Module]


class Counting(nn.Linear):
    """Counts its calls in Python, and computes with the count."""

    calls = 0

    def forward(self, input: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(input) * self.calls


class Scaled(nn.Module):
    """Writes into its input, and has a part that it does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(5))
        self.unused = nn.Parameter(torch.ones(3))
        self.last = nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(x.mul_(self.scale))


def encoder() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5), nn.Tanh()).double()


def head(dropout: float = 0.0) -> nn.Module:
    return nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Dropout(dropout), nn.Linear(7, 2)).double()


def normed_head() -> nn.Module:
    # Without a bias, whose gradient before a norm is nothing but rounding, which Adam would blow up.
    return nn.Sequential(nn.Linear(5, 7, bias=False), nn.BatchNorm1d(7), nn.ReLU(), nn.Linear(7, 2)).double()


def scaled_head() -> nn.Module:
    return Scaled().double()


def make_heads(make: Callable[[], nn.Module] = head) -> Heads:
    torch.manual_seed(2)
    return {name: make() for name in NAMES}


def data() -> tuple[Tensor, Tensor]:
    torch.manual_seed(3)
    return torch.randn(ROWS, 6).double(), torch.randn(ROWS, 2).double()


def labels() -> Tensor:
    torch.manual_seed(4)
    return torch.randint(0, 2, (ROWS,))


def weights(models: Mapping[str, nn.Module]) -> dict[str, np.ndarray]:
    return {
        f"{name}.{path}": tensor.detach().numpy().copy()
        for name, model in models.items()
        for path, tensor in model.state_dict().items()
    }


def distance(ours: Mapping[str, nn.Module], theirs: Mapping[str, nn.Module]) -> float:
    own, other = weights(ours), weights(theirs)
    assert own.keys() == other.keys()
    return max(float(np.abs(own[name] - other[name]).max()) for name in own)


def make_graph(heads: Heads, first: nn.Module, devices: Any = "cpu", optimizer: Any = "adam") -> mf.Graph:
    fleet = mf.Fleet(heads, devices="cpu")
    fleet.compile(optimizer, "mse", lr=mf.each(RATES))
    graph = mf.Graph({"encoder": first, "heads": fleet}, [("encoder", "heads")], outputs="heads", devices=devices)
    graph.compile("sgd", lr=0.05)
    return graph


def fit(graph: mf.Graph, rows: Any = None, epochs: int = EPOCHS, **options: Any) -> mf.History:
    given: dict[str, Any] = {"batch_size": BATCH, "shuffle": False, "progress": False, **options}
    return graph.fit(data() if rows is None else rows, epochs=epochs, **given)


def by_hand(
    first: nn.Module,
    heads: Heads,
    optimizers: Callable[[str, nn.Module], torch.optim.Optimizer] | None = None,
    targets: Mapping[str, Tensor] | None = None,
    clip_norm: float | None = None,
) -> None:
    """Train the undivided computation in plain torch: one encoder, the sum of the heads' losses."""
    x, y = data()

    def adam(name: str, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Adam(model.parameters(), lr=RATES[NAMES.index(name)])

    make = optimizers or adam
    every = [make(name, model) for name, model in heads.items()]
    if any(parameter.requires_grad for parameter in first.parameters()):
        every.append(torch.optim.SGD(first.parameters(), lr=0.05))
    parameters = [p for optimizer in every for group in optimizer.param_groups for p in group["params"]]
    for _ in range(EPOCHS):
        for start in range(0, ROWS, BATCH):
            rows = slice(start, start + BATCH)
            features = first(x[rows])
            losses = [
                nn.functional.mse_loss(model(features.clone()), (targets[name] if targets else y)[rows])
                for name, model in heads.items()
            ]
            for optimizer in every:
                optimizer.zero_grad()
            torch.stack(losses).sum().backward()
            if clip_norm is not None:
                torch.nn.utils.clip_grad_norm_(parameters, clip_norm)
            for optimizer in every:
                optimizer.step()


# --- the undivided computation -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("devices", "options"),
    [
        ("cpu", {}),
        ("cpu", {"micro_batches": 3}),
        ("cpu", {"micro_batches": 3, "recompute": True}),
        ("cpu:0,cpu:1", {"micro_batches": 4, "pipeline": "zero-bubble"}),
        ({"encoder": "cpu:0", "heads": ["cpu:0", "cpu:1"]}, {"micro_batches": 3}),
        ("cpu:0,cpu:1", {"micro_batches": 2, "strategy": "processes"}),
    ],
    ids=["one", "micro-batches", "recompute", "zero-bubble", "replicas", "processes"],
)
@pytest.mark.parametrize("make", [head, scaled_head])
def test_heads_equal_the_undivided_computation(
    make: Callable[[], nn.Module], devices: Any, options: dict[str, Any]
) -> None:
    ours, theirs = (encoder(), make_heads(make)), (encoder(), make_heads(make))
    graph = make_graph(ours[1], ours[0], devices)
    fit(graph, **options)
    by_hand(*theirs)
    assert distance({"encoder": ours[0], **ours[1]}, {"encoder": theirs[0], **theirs[1]}) < EXACT
    x, _ = data()
    found = graph.predict(x)
    assert list(found) == NAMES
    for model in theirs[1].values():
        model.eval()
    for name in NAMES:
        assert np.abs(found[name] - theirs[1][name](theirs[0](x)).detach().numpy()).max() < EXACT


def test_batch_norm_in_the_heads_equals_the_undivided_computation() -> None:
    ours, theirs = (encoder(), make_heads(normed_head)), (encoder(), make_heads(normed_head))
    fit(make_graph(ours[1], ours[0]))
    by_hand(*theirs)
    assert distance({"encoder": ours[0], **ours[1]}, {"encoder": theirs[0], **theirs[1]}) < EXACT


def test_every_member_has_its_own_kind_of_optimizer() -> None:
    kinds = [torch.optim.Adam, torch.optim.SGD, torch.optim.Adam, torch.optim.RMSprop]
    ours, theirs = (encoder(), make_heads()), (encoder(), make_heads())
    fit(make_graph(ours[1], ours[0], optimizer=mf.each(kinds)))
    by_hand(*theirs, lambda name, model: kinds[NAMES.index(name)](model.parameters(), lr=RATES[NAMES.index(name)]))
    assert distance({"encoder": ours[0], **ours[1]}, {"encoder": theirs[0], **theirs[1]}) < EXACT


def test_a_fleet_that_is_not_compiled_is_trained_by_the_graphs_recipe() -> None:
    ours, theirs = (encoder(), make_heads()), (encoder(), make_heads())
    graph = mf.Graph(
        {"encoder": ours[0], "heads": mf.Fleet(ours[1], devices="cpu")},
        [("encoder", "heads")],
        outputs="heads",
        devices="cpu",
    )
    graph.compile("sgd", "mse", lr=mf.each({"encoder": 0.05, "heads": 0.02}), clip_norm=0.5)
    fit(graph)
    by_hand(*theirs, lambda _, model: torch.optim.SGD(model.parameters(), lr=0.02), clip_norm=0.5)
    assert distance({"encoder": ours[0], **ours[1]}, {"encoder": theirs[0], **theirs[1]}) < EXACT


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_targets_by_member(micro_batches: int) -> None:
    x, y = data()
    targets = {name: y * (number + 1) for number, name in enumerate(NAMES)}
    ours, theirs = (encoder(), make_heads()), (encoder(), make_heads())
    fit(make_graph(ours[1], ours[0]), (x, targets), micro_batches=micro_batches)
    by_hand(*theirs, targets=targets)
    assert distance({"encoder": ours[0], **ours[1]}, {"encoder": theirs[0], **theirs[1]}) < EXACT


# --- as a fleet alone --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_heads_on_a_frozen_encoder_are_what_they_are_in_a_fleet_alone(dropout: float, micro_batches: int) -> None:
    x, y = data()
    first, ours, theirs = encoder().requires_grad_(False), make_heads(lambda: head(dropout)), {}
    theirs = copy.deepcopy(ours)
    history = fit(make_graph(ours, first), micro_batches=micro_batches)
    alone = mf.Fleet(theirs, devices="cpu")
    alone.compile("adam", "mse", lr=mf.each(RATES))
    expected = alone.fit((first(x), y), epochs=EPOCHS, batch_size=BATCH, shuffle=False, progress=False)
    assert distance(ours, theirs) < EXACT
    for name in NAMES:
        assert history[name]["loss"] == pytest.approx(expected[name]["loss"], abs=EXACT)


def test_the_heads_draw_from_their_own_streams_and_the_encoder_from_the_graphs() -> None:
    def run(names: list[str]) -> tuple[nn.Module, Heads]:
        first, heads = nn.Sequential(encoder(), nn.Dropout(0.3)), make_heads(lambda: head(0.4))
        first.requires_grad_(False)
        heads = {name: heads[name] for name in names}
        fleet = mf.Fleet(heads, devices="cpu")
        fleet.compile("adam", "mse", lr=1e-2)
        graph = mf.Graph({"e": first, "heads": fleet}, [("e", "heads")], outputs="heads", devices="cpu")
        graph.compile("sgd", lr=0.1)
        fit(graph)
        return first, heads

    _, all_of_them = run(NAMES)
    _, some = run(NAMES[2:])
    assert distance({name: all_of_them[name] for name in some}, some) < EXACT


def test_dropout_in_micro_batches_is_that_of_the_whole_batch() -> None:
    def run(micro_batches: int) -> Heads:
        first, heads = nn.Sequential(encoder(), nn.Dropout(0.3)), make_heads(lambda: head(0.4))
        fit(make_graph(heads, first), micro_batches=micro_batches)
        return {"encoder": first, **heads}

    assert distance(run(1), run(3)) < EXACT


def test_heads_on_a_detached_edge_change_no_other_node() -> None:
    x, y = data()

    def run(with_heads: bool) -> Heads:
        first, last = encoder(), head(0.5)
        nodes: dict[str, Any] = {"encoder": first}
        edges: list[Any] = [("encoder", "last")]
        targets = {"last": y}
        if with_heads:
            heads = {name: nn.Sequential(nn.Dropout(0.3), model) for name, model in make_heads().items()}
            nodes["heads"] = mf.Fleet(heads, devices="cpu")
            edges.append(mf.Edge("encoder", "heads", detach=True))
            targets["heads"] = y * float("nan")
        graph = mf.Graph({**nodes, "last": last}, edges, devices="cpu")
        graph.compile("sgd", "mse", lr=0.1)
        if not with_heads:
            fit(graph, (x, targets))
        else:
            history = fit(graph, (x, targets))
            assert set(history.failed) == set(NAMES)
            assert np.isfinite(history["graph"]["last_loss"]).all()
        return {"encoder": first, "last": last}

    assert distance(run(False), run(True)) < EXACT


def test_shuffled_rows_are_the_same_for_all_members() -> None:
    first, ours = encoder(), make_heads()
    plain, single = encoder(), make_heads()
    fit(make_graph(ours, first), shuffle=True)
    # The same graph with one node for each head.
    graph = mf.Graph(
        {"encoder": plain, **single}, [("encoder", name) for name in NAMES], outputs=NAMES, devices="cpu"
    )
    graph.compile(mf.each([torch.optim.SGD, *[torch.optim.Adam] * 4]), "mse", lr=mf.each([0.05, *RATES]))
    x, y = data()
    fit(graph, (x, dict.fromkeys(NAMES, y)), shuffle=True)
    assert distance({"encoder": first, **ours}, {"encoder": plain, **single}) < EXACT


# --- values ------------------------------------------------------------------------------------------------------


def test_every_member_has_its_losses_and_metrics_in_the_history() -> None:
    x, y = data()[0], labels()
    heads = make_heads()
    fleet = mf.Fleet(heads, devices="cpu")
    fleet.compile("adam", "cross_entropy", metrics=["accuracy"], lr=1e-2)
    first = encoder()
    graph = mf.Graph({"encoder": first, "heads": fleet}, [("encoder", "heads")], outputs="heads", devices="cpu")
    graph.compile("sgd", lr=0.05)
    history = fit(graph, (x, y), validation=(x, y))
    assert list(history) == ["graph", *NAMES]
    assert set(history["m02"]) == {"loss", "accuracy", "val_loss", "val_accuracy"}
    for epoch in range(EPOCHS):
        total = sum(history[name]["loss"][epoch] for name in NAMES)
        assert history["graph"]["loss"][epoch] == pytest.approx(total)
    values = graph.evaluate((x, y))
    for name, model in heads.items():
        output = model.eval()(first(x)).detach()
        assert values[f"{name}_loss"] == pytest.approx(float(nn.functional.cross_entropy(output, y)))
        assert values[f"{name}_accuracy"] == pytest.approx(float((output.argmax(1) == y).double().mean()))
        assert history[name]["val_loss"][-1] == pytest.approx(values[f"{name}_loss"])
    assert values["loss"] == pytest.approx(sum(values[f"{name}_loss"] for name in NAMES))


def test_members_have_losses_of_their_own() -> None:
    first, heads = encoder(), make_heads()
    fleet = mf.Fleet(heads, devices="cpu")
    fleet.compile("adam", mf.each(["mse", "mae", "mse", "huber"]), lr=1e-2)
    graph = mf.Graph({"encoder": first, "heads": fleet}, [("encoder", "heads")], outputs="heads", devices="cpu")
    graph.compile("sgd", lr=0.05)
    x, y = data()
    fit(graph)
    values = graph.evaluate((x, y))
    output = heads["m01"].eval()(first(x))
    assert values["m01_loss"] == pytest.approx(float((output - y).abs().mean().detach()))


def test_members_of_two_fleets_with_the_same_names_are_told_apart() -> None:
    first = encoder()
    fleets = {name: mf.Fleet([head(), head()], devices="cpu") for name in ("a", "b")}
    graph = mf.Graph({"e": first, **fleets}, [("e", "a"), ("e", "b")], outputs=["a", "b"], devices="cpu")
    graph.compile("sgd", "mse", lr=0.05)
    x, y = data()
    history = fit(graph, (x, {"a": y, "b": y}), epochs=1)
    assert list(history) == ["graph", "a.0", "a.1", "b.0", "b.1"]
    assert history["graph"]["loss"][0] == pytest.approx(
        sum(history[name]["loss"][0] for name in list(history)[1:])
    )
    assert history["graph"]["a_loss"][0] == pytest.approx(history["a.0"]["loss"][0] + history["a.1"]["loss"][0])
    assert set(graph.predict(x)) == {"a", "b"}


def test_the_output_of_one_member_may_go_on_to_another_node() -> None:
    first, heads, last = encoder(), make_heads(), nn.Linear(2, 1).double()
    theirs = copy.deepcopy((first, heads, last))
    fleet = mf.Fleet(heads, devices="cpu")
    graph = mf.Graph(
        {"e": first, "heads": fleet, "last": last},
        [("e", "heads"), ("heads.m01", "last")],
        outputs="last",
        devices="cpu",
    )
    graph.compile("sgd", "mse", lr=0.1)
    x, y = data()
    fit(graph, (x, y[:, :1]), epochs=1, micro_batches=2)
    parameters = [*theirs[0].parameters(), *theirs[1]["m01"].parameters(), *theirs[2].parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    for start in range(0, ROWS, BATCH):
        rows = slice(start, start + BATCH)
        optimizer.zero_grad()
        nn.functional.mse_loss(theirs[2](theirs[1]["m01"](theirs[0](x[rows]))), y[rows, :1]).backward()
        optimizer.step()
    assert distance({"e": first, "last": last, **heads}, {"e": theirs[0], "last": theirs[2], **theirs[1]}) < EXACT


def test_the_fleet_is_the_users_own_with_the_new_weights() -> None:
    x, _ = data()
    first, heads = encoder(), make_heads()
    graph = make_graph(heads, first)
    fleet = graph["heads"]
    assert isinstance(fleet, mf.Fleet)
    fleet.predict(first(x).detach())  # its lanes have the weights from before
    fit(graph)
    assert fleet["m03"] is heads["m03"]
    expected = graph.predict(x)
    found = fleet.predict(first(x).detach())
    for name in NAMES:
        assert np.abs(found[name] - expected[name]).max() < EXACT


def test_heads_may_share_a_frozen_part() -> None:
    shared = nn.Linear(5, 5).double().requires_grad_(False)
    first, ours = encoder(), make_heads(lambda: nn.Sequential(shared, head()))
    theirs = copy.deepcopy((first, ours))
    fit(make_graph(ours, first), micro_batches=2)
    by_hand(*theirs)
    assert distance({"encoder": first, **ours}, {"encoder": theirs[0], **theirs[1]}) < EXACT


def test_the_best_weights_of_the_graph_are_restored() -> None:
    x, y = data()
    first, heads = encoder(), make_heads()
    graph = make_graph(heads, first)
    validation = x, -y  # gets worse from the second epoch on
    stopping = mf.EarlyStopping("val_loss", patience=1, restore_best=True)
    history = fit(graph, validation=validation, callbacks=[stopping], epochs=20)
    kept = history.kept["graph"]
    assert kept < len(history["graph"]["loss"]) < 20
    assert graph.evaluate(validation)["loss"] == pytest.approx(history["graph"]["val_loss"][kept - 1])


def test_a_chain_may_end_with_a_fleet() -> None:
    first, heads = encoder(), make_heads()
    theirs = copy.deepcopy((first, heads))
    fleet = mf.Fleet(heads, devices="cpu")
    fleet.compile("adam", "mse", lr=mf.each(RATES))
    chain = mf.Chain([first, fleet], devices="cpu:0,cpu:1")
    chain.compile("sgd", lr=0.05)
    assert list(fit(chain)) == ["chain", *NAMES]
    by_hand(*theirs)
    assert distance({"e": first, **heads}, {"e": theirs[0], **theirs[1]}) < EXACT


# --- trouble -----------------------------------------------------------------------------------------------------


def targets_with_nan() -> dict[str, Tensor]:
    _, y = data()
    targets = {name: y.clone() for name in NAMES}
    targets["m01"][2 * BATCH :] = float("nan")  # in the third step
    return targets


def test_behind_a_frozen_encoder_a_member_fails_by_itself() -> None:
    x, _ = data()
    first = encoder().requires_grad_(False)
    ours, theirs = make_heads(), make_heads()
    graph = make_graph(ours, first)
    history = fit(graph, (x, targets_with_nan()))
    others = [name for name in NAMES if name != "m01"]
    by_hand(first, theirs)
    assert distance({n: ours[n] for n in others}, {n: theirs[n] for n in others}) < EXACT
    assert (history.failed["m01"].epoch, history.failed["m01"].step) == (1, 3)
    assert "loss" in history.failed["m01"].reason
    assert history["m01"] == {}
    assert len(history["graph"]["loss"]) == EPOCHS
    assert np.isfinite(history["graph"]["loss"]).all()
    # The next fit tries it again.
    assert len(fit(graph, epochs=1)["m01"]["loss"]) == 1


def test_the_graph_ends_when_every_head_has_failed() -> None:
    x, y = data()
    graph = make_graph(make_heads(), encoder().requires_grad_(False))
    with pytest.raises(mf.AllFailedError, match=r"All 4 members failed") as caught:
        fit(graph, (x, y * float("nan")))
    assert set(caught.value.history.failed) == set(NAMES)


@pytest.mark.parametrize("strategy", ["threads", "processes"])
def test_heads_that_fail_one_after_the_other_keep_their_last_good_weights(strategy: str) -> None:
    x, y = data()
    targets, good = {name: y.clone() for name in NAMES}, dict(zip(NAMES, (1, 2, 3, 3), strict=True))  # of 5 steps
    for name, steps in good.items():
        targets[name][steps * BATCH :] = float("nan")
    ours = make_heads()
    graph = make_graph(ours, encoder().requires_grad_(False), "cpu:0,cpu:1")
    with pytest.raises(mf.AllFailedError, match=r"All 4 members failed") as caught:
        fit(graph, (x, targets), strategy=strategy)
    failed = caught.value.history.failed
    assert {name: failed[name].step for name in NAMES} == {name: steps + 1 for name, steps in good.items()}
    for number, (name, model) in enumerate(make_heads().items()):
        fleet = mf.Fleet({name: model})
        fleet.compile("adam", "mse", lr=RATES[number])
        rows = slice(0, good[name] * BATCH)
        features = encoder()(x).detach()
        fleet.fit((features[rows], y[rows]), batch_size=BATCH, shuffle=False, progress=False)
        assert distance({name: ours[name]}, {name: model}) < EXACT


def test_a_member_that_would_spoil_the_encoder_stops_the_graph_by_name() -> None:
    x, _ = data()
    first, heads = encoder(), make_heads()
    graph = make_graph(heads, first)
    with pytest.raises(
        mf.AllFailedError, match=r"member 'm01' failed in epoch 1, step 3.*graph stopped"
    ) as caught:
        fit(graph, (x, targets_with_nan()))
    assert set(caught.value.history.failed) == {"m01", "graph"}
    assert all(np.isfinite(array).all() for array in weights({"encoder": first, **heads}).values())


def test_members_of_unlike_structures_are_refused() -> None:
    heads = mf.Fleet({"a": head(), "b": nn.Linear(5, 2).double()}, devices="cpu")
    graph = mf.Graph({"e": encoder(), "heads": heads}, [("e", "heads")], outputs="heads", devices="cpu")
    graph.compile("sgd", "mse", lr=0.1)
    with pytest.raises(mf.InputError, match=r"'a' and 'b' of the fleet 'heads' differ.*one structure"):
        fit(graph)


def test_members_that_count_in_python_are_refused_and_left_as_they_were() -> None:
    heads = [Counting(5, 2).double(), Counting(5, 2).double()]
    graph = mf.Graph(
        {"e": encoder(), "heads": mf.Fleet(heads, devices="cpu")},
        [("e", "heads")],
        outputs="heads",
        devices="cpu",
    )
    graph.compile("sgd", "mse", lr=0.1)
    with pytest.raises(mf.InputError, match=r"'heads' can't be a node.*changes self\.calls.*node of each member"):
        fit(graph)
    assert [model.calls for model in heads] == [0, 0]


def test_targets_of_some_members_only_are_refused() -> None:
    x, y = data()
    with pytest.raises(mf.InputError, match=r"'heads' are a dict of 1 members, but the fleet has 4"):
        fit(make_graph(make_heads(), encoder()), (x, {"m00": y}))


def test_a_fleet_compiled_without_a_loss_is_refused() -> None:
    fleet = mf.Fleet(make_heads(), devices="cpu")
    fleet.compile("adam", lr=0.1)
    graph = mf.Graph({"e": encoder(), "heads": fleet}, [("e", "heads")], outputs="heads", devices="cpu")
    with pytest.raises(mf.InputError, match=r"'m00' of the fleet 'heads' was compiled without a loss"):
        graph.compile("sgd", lr=0.1)


def test_a_weight_that_a_head_shares_with_the_encoder_is_refused() -> None:
    first, heads = encoder(), make_heads()
    first.register_parameter("extra", next(heads["m02"].parameters()))
    with pytest.raises(mf.InputError, match=r"'encoder' and 'heads\.m02' share the weight"):
        make_graph(heads, first)


# --- on disk -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", ["fleet", "models", "list"])
def test_a_saved_graph_continues_as_this_one_would(given: str, tmp_path: Path) -> None:
    def graph() -> tuple[mf.Graph, nn.Module, Heads]:
        first, heads = encoder(), make_heads(lambda: head(0.3))
        return make_graph(heads, first), first, heads

    unbroken, first, heads = graph()
    fit(unbroken, epochs=2)
    unbroken.save(tmp_path / "saved")
    fit(unbroken, epochs=2)

    torch.manual_seed(9)
    fresh = {name: head(0.3) for name in NAMES}
    models: Any = {"fleet": mf.Fleet(fresh, seed=7, devices="cpu"), "models": fresh, "list": list(fresh.values())}
    again = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5), nn.Tanh()).double()
    loaded = mf.Graph.load(tmp_path / "saved", {"encoder": again, "heads": models[given]}, devices="cpu")
    fit(loaded, epochs=2)
    assert distance({"e": first, **heads}, {"e": again, **fresh}) < EXACT


def test_a_broken_run_continues_from_its_checkpoint(tmp_path: Path) -> None:
    class Stop(mf.Callback):
        def on_epoch_end(self, run: Any) -> None:
            if run.epoch == 2:
                raise RuntimeError("stopped here")

    unbroken, broken = (encoder(), make_heads(lambda: head(0.3))), (encoder(), make_heads(lambda: head(0.3)))
    expected = fit(make_graph(unbroken[1], unbroken[0]))
    with pytest.raises(RuntimeError, match="stopped here"):
        fit(make_graph(broken[1], broken[0]), callbacks=[mf.Checkpoint(tmp_path / "run"), Stop()])
    fresh = encoder(), make_heads(lambda: head(0.3))
    again = make_graph(fresh[1], fresh[0], "cpu:0,cpu:1")
    history = fit(again, callbacks=[mf.Checkpoint(tmp_path / "run"), mf.Callback()], micro_batches=2)
    assert distance({"e": unbroken[0], **unbroken[1]}, {"e": fresh[0], **fresh[1]}) < EXACT
    for name in expected:
        assert history[name]["loss"] == pytest.approx(expected[name]["loss"], abs=EXACT)
