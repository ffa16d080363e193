"""The state of a lane's members: read and written by name, and moved to other lanes with its counts."""

from collections.abc import Collection, Sequence

import numpy as np
import pytest
import torch
from tests.helpers import equal, fit, fleet_of, toy, weights

from modelfleet.frameworks.stacked import WEIGHTS, by_path
from modelfleet.lanes import Lane
from modelfleet.lanes.lane import COUNTS
from modelfleet.types import State


def trained(epochs: int) -> Lane:
    """A lane of three members after a fit of Adam, with three steps in each epoch."""
    fleet = fleet_of(["a", "b", "c"], optimizer="adam", lr=0.01)
    fit(fleet, toy(24), batch_size=8, epochs=epochs, strategy="fused")
    return fleet._live_lanes.lanes[0]


def test_steps_and_epochs_move_with_the_rest_of_a_state() -> None:
    source, target = trained(2), trained(1)
    target.write(["c", "b"], source.read(["a", "b"], host=True))
    assert target.steps.tolist() == [3, 6, 6]
    assert target.epochs.tolist() == [1, 2, 2]
    moved, expected = by_path(target.read(["b"])), by_path(source.read(["b"]))
    assert moved.keys() == expected.keys()
    for path, tensor in expected.items():
        np.testing.assert_array_equal(moved[path], tensor, err_msg=path)


def test_weights_alone_leave_steps_and_epochs() -> None:
    source, target = trained(2), trained(1)
    snapshot = source.read(["a"], WEIGHTS)
    assert COUNTS not in snapshot
    target.write(["a"], snapshot)
    assert target.steps.tolist() == [3, 3, 3]
    assert target.engine.steps_taken().tolist() == [3, 3, 3]
    assert equal(target.read(["a"], WEIGHTS), snapshot)


def test_a_lane_adopts_what_the_models_do_not_hold() -> None:
    source, target = trained(2), trained(1)
    before = target.read(target.names, WEIGHTS)
    target.adopt(["b", "a"], source, ["c", "b"])
    assert target.steps.tolist() == [6, 6, 3]
    assert target.epochs.tolist() == [2, 2, 1]
    assert target.engine.steps_taken().tolist() == [6, 6, 3]
    assert equal(target.read(["b", "a"], ("optimizer",)), source.read(["c", "b"], ("optimizer",)))
    assert equal(target.read(target.names, WEIGHTS), before)


def test_members_are_adopted_together_except_for_those_with_replaced_parameters(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source, target = trained(2), trained(1)
    fresh = target.read(["b"], ("optimizer",))["optimizer"]
    model = source.members[1].model
    model[0].bias = torch.nn.Parameter(model[0].bias.detach().clone())
    reads: list[list[int]] = []
    read = source.engine.read

    def watched(positions: Sequence[int], parts: Collection[str] | None = None) -> State:
        reads.append(list(positions))
        return read(positions, parts)

    monkeypatch.setattr(source.engine, "read", watched)
    target.adopt(["a", "b", "c"], source, ["a", "b", "c"])
    assert reads == [[0, 2], [1]]
    assert equal(target.read(["a", "c"], ("optimizer",)), source.read(["a", "c"], ("optimizer",)))
    ours, theirs = target.read(["b"])["optimizer"], source.read(["b"])["optimizer"]
    for name, tensor in ours.items():
        expected = fresh if name.endswith("/0.bias") else theirs
        assert torch.equal(tensor, expected[name]), name


def test_some_members_go_to_their_models_and_back() -> None:
    lane = trained(1)
    models = {member.name: member.model for member in lane.members}
    lane.give_slots(["c", "a"])
    with torch.no_grad():
        for model in models.values():
            model[0].bias.zero_()
    lane.gather(["b", "c"])
    lane.gather([])
    assert (lane.read(["b", "c"], WEIGHTS)["params"]["0.bias"] == 0).all()
    assert (lane.read(["a"], WEIGHTS)["params"]["0.bias"] != 0).any()
    lane.scatter(["a"])
    assert (weights(models["a"])["0.bias"] != 0).any()
    assert (weights(models["b"])["0.bias"] == 0).all()
