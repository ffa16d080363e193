"""The benchmark's peers do the same work: the same weights give the same losses, step by step."""

from dataclasses import replace
from importlib.util import find_spec
from io import StringIO
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from benchmarks import crowds
from benchmarks.contests import CONTESTS, FLEET, IDEAL
from benchmarks.harness import Result
from benchmarks.peers import balance, jax_vmap, map_split
from benchmarks.peers.torch_loop import Trainee, trainees
from benchmarks.report import Report, growth_lines, ratio, show
from benchmarks.rows import JAX, ROWS, TORCH, Row, datasets
from rich.console import Console
from torch import nn


def small(name: str) -> Row:
    row = ROWS[name]
    return replace(row, members=2, examples=2 * row.batch)


def dense(layer: Any) -> dict[str, np.ndarray]:
    return {"w": layer.weight.detach().numpy().T, "b": layer.bias.detach().numpy()}


def patches(layer: nn.Conv2d) -> dict[str, np.ndarray]:
    weight = layer.weight.detach().numpy().transpose(2, 3, 1, 0)  # (height, width, in, out)
    return {"w": weight.reshape(-1, weight.shape[-1]), "b": dense(layer)["b"]}


def scales(layer: Any) -> dict[str, np.ndarray]:
    return {"w": layer.weight.detach().numpy(), "b": layer.bias.detach().numpy()}


def jax_params(row: Row, net: Any) -> Any:
    """A copy of the weights of a torch network of `row`, as its JAX twin wants them."""
    found: Any
    if row.net == "mlp":
        found = {"layers": [dense(layer) for layer in net if isinstance(layer, nn.Linear)]}
    elif row.net == "cnn":
        found = {"first": patches(net[0]), "second": patches(net[3]), "head": head_of_image(net[7])}
    elif row.net == "lstm":
        pairs = {
            part: {
                "w": getattr(net.lstm, f"weight_{kind}_l0").detach().numpy().T,
                "b": getattr(net.lstm, f"bias_{kind}_l0").detach().numpy(),
            }
            for part, kind in (("input", "ih"), ("hidden", "hh"))
        }
        found = {**pairs, "head": dense(net.head)}
    else:
        found = {
            "embedding": net.embedding.weight.detach().numpy(),
            "positions": net.positions.detach().numpy(),
            "layers": [block(layer) for layer in net.layers],
            "head": dense(net.head),
        }
    return jax.tree.map(lambda leaf: jnp.array(leaf, copy=True), found)


def head_of_image(layer: nn.Linear) -> dict[str, np.ndarray]:
    weight = layer.weight.detach().numpy().reshape(-1, 16, 7, 7)  # torch flattens (channel, height, width)
    return {"w": weight.transpose(2, 3, 1, 0).reshape(16 * 7 * 7, -1), "b": dense(layer)["b"]}


def block(layer: Any) -> dict[str, Any]:
    attention = layer.self_attn
    return {
        "qkv": {
            "w": attention.in_proj_weight.detach().numpy().T,
            "b": attention.in_proj_bias.detach().numpy(),
        },
        "out": dense(attention.out_proj),
        "up": dense(layer.linear1),
        "down": dense(layer.linear2),
        "norm1": scales(layer.norm1),
        "norm2": scales(layer.norm2),
    }


@pytest.fixture
def unshuffled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "randperm", torch.arange)


@pytest.mark.usefixtures("unshuffled")
@pytest.mark.parametrize("name", ["mlp-64", "mlp-2000", "cnn", "transformer", "lstm"])
def test_torch_and_jax_peers_train_alike(name: str) -> None:
    row = small(name)
    members: list[Trainee] = trainees(row, range(row.members))
    state = jax_vmap.start_state(row)
    params = jax.tree.map(lambda *leaves: jnp.stack(leaves), *[jax_params(row, one.model) for one in members])
    assert jax.tree.map(jnp.shape, params) == jax.tree.map(jnp.shape, state.params)
    state = state._replace(params=params)

    data = datasets(row)
    x, y = [np.stack(arrays) for arrays in zip(*data, strict=True)] if row.own_data else data[0]
    order = np.arange(row.examples).reshape(row.steps, 1, row.batch).repeat(row.members, 1)
    epoch = jax_vmap.make_epoch(row)
    for _ in range(3):
        state = epoch(state, jnp.asarray(row.rates()), jnp.asarray(x), jnp.asarray(y), jnp.asarray(order))
        losses, accuracies = zip(*[one.train_epoch(row.batch) for one in members], strict=True)
        np.testing.assert_allclose(np.asarray(state.loss) / row.examples, losses, rtol=2e-4)
        np.testing.assert_allclose(np.asarray(state.correct) / row.examples, accuracies, atol=1.5 / row.examples)


def test_members_of_a_row_differ_where_it_says_so() -> None:
    assert len(set(ROWS["mlp-64"].rates().tolist())) == 64
    own = datasets(small("mlp-2000"))
    assert len(own) == 2
    assert not np.array_equal(own[0][0], own[1][0])
    assert len(datasets(small("mlp-wide"))) == 1
    assert all(row.examples % row.batch == 0 for row in ROWS.values())


def test_a_ratio_compares_the_same_work() -> None:
    fleet = Result(FLEET, seconds=(2.0, 1.0), member_steps=1000)
    torch_loop = Result(TORCH, seconds=(4.0, 5.0), member_steps=100)
    row = ROWS["mlp-64"]
    found = ratio(row, [fleet, torch_loop], torch_loop)
    assert found is not None
    assert (found.value, found.low, found.high) == (40.0, 20.0, 50.0)
    assert found.reached
    left_out = Result(JAX, problem="took more than 120 s")
    assert ratio(row, [fleet, left_out], left_out) is None


def test_growth_tells_a_dearer_member_from_a_cheaper_one() -> None:
    def result(members: int, seconds_per_member: float) -> Result:
        return Result(FLEET, seconds=(seconds_per_member * members,), member_steps=members, memory=1e6 * members)

    cheap, same, dear = growth_lines({16: result(16, 1.0), 64: result(64, 1.0), 256: result(256, 1.5)})
    assert "reached" not in cheap
    assert same["reached"]
    assert not dear["reached"]
    assert dear["time_growth"] == pytest.approx(1.5)


def test_answers_in_any_order_become_every_user_s_own() -> None:
    rows = crowds.crowd(quick=True) | {"many": crowds.uneven(quick=True)["large0"]}
    net = crowds.network()
    backwards = [(one.user, one.start, crowds.answer(net, one.rows)) for one in crowds.batches(rows)][::-1]
    assert len(backwards) > len(rows)  # somebody's rows are in several batches
    found = crowds.gathered(rows, backwards)
    crowds.check(found, rows)
    with torch.inference_mode():
        np.testing.assert_allclose(
            found["many"], net(torch.from_numpy(rows["many"])).numpy(), rtol=1e-4, atol=1e-5
        )


def test_answers_that_are_missing_or_another_s_are_refused() -> None:
    rows = crowds.crowd(quick=True)
    right = crowds.by_loop(crowds.network(), rows)
    with pytest.raises(ValueError, match="expected those of"):
        crowds.check({user: right[user] for user in list(right)[1:]}, rows)
    with pytest.raises(AssertionError, match="user1"):
        crowds.check(right | {"user1": right["user1"][::-1]}, rows)
    with pytest.raises(AssertionError, match="user0"):
        crowds.check(right | {"user0": np.full_like(right["user0"], np.nan)}, rows)


def test_a_slowed_network_works_more_for_the_same_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    net = nn.Linear(2, 3)
    net.register_forward_hook(lambda *_: calls.append(1))
    slowed, x = crowds.Slowed(net), np.ones((4, 2), np.float32)
    answers = []
    for device, expected in (("cpu:0", 1), (crowds.SLOW, crowds.TIMES)):
        monkeypatch.setenv("MODELFLEET_DEVICE", device)
        calls.clear()
        answers.append(crowds.answer(slowed, x))
        assert len(calls) == expected
    np.testing.assert_array_equal(answers[0], answers[1])


def test_the_splitting_peer_answers_as_the_loop_does() -> None:
    before = torch.get_num_threads()
    try:
        assert map_split.prepare(True)().member_steps == crowds.count(crowds.crowd(quick=True))
    finally:
        torch.set_num_threads(before)


def test_the_notes_of_a_round_are_what_it_added_to_the_stats() -> None:
    def user(requests: int, mean_wait: float) -> SimpleNamespace:
        return SimpleNamespace(requests=requests, mean_wait=mean_wait)

    def stats(users: dict[str, SimpleNamespace], fast: int, slow: int) -> Any:
        replicas = {"cpu:0": SimpleNamespace(rows=fast), "cpu:1": SimpleNamespace(rows=slow)}
        return SimpleNamespace(users=users, replicas=replicas)

    before = stats({"large0": user(1, 0.0), "small0": user(1, 9.0), "small1": user(1, 9.0)}, 100, 900)
    after = stats({"large0": user(2, 0.5), "small0": user(2, 5.5), "small1": user(2, 6.5)}, 600, 1000)
    assert list(balance.notes(before, after).values()) == pytest.approx([3.0, 4.0, 1.0, 1 / 6])


def test_within_ten_percent_of_the_ideal_is_reached() -> None:
    contest = CONTESTS["devices-balance"]
    ideal = Result(IDEAL, seconds=(1.0,), member_steps=100)
    for seconds, reached in ((1.09, True), (1.11, False)):
        found = ratio(contest, [Result(FLEET, seconds=(seconds,), member_steps=100), ideal], ideal)
        assert found is not None
        assert found.reached is reached


def test_a_table_has_its_unit_and_its_notes() -> None:
    result = Result(FLEET, seconds=(2.0,), member_steps=500, notes={"small users waited, mean s": 0.125})
    console = Console(width=100, record=True, file=StringIO())
    show(Report(False, [(CONTESTS["devices-balance"], [result])]), console)
    text = console.export_text()
    assert "rows/s" in text
    assert "250" in text
    assert "modelfleet: small users waited, mean s 0.125" in text


def test_every_entrant_has_its_module() -> None:
    for contest in CONTESTS.values():
        assert FLEET in contest.entrants
        assert set(contest.bars) <= set(contest.entrants) - {FLEET}
        for entrant in contest.entrants.values():
            assert find_spec(f"benchmarks.peers.{entrant.module}") is not None
