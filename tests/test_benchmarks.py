"""The benchmark's peers do the same work: the same weights give the same losses, step by step."""

from dataclasses import replace
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from benchmarks import accelerators, crowds, harness, jobs, timeline
from benchmarks.contests import BEST_CUT, CONTESTS, FLEET, IDEAL, THEORY
from benchmarks.entrants import PLAIN, Contest, Entrant
from benchmarks.harness import Result
from benchmarks.peers import balance, chain_schedules, jax_vmap, map_split, predicting, split_cut
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


def test_of_two_bars_that_stand_for_each_other_one_is_enough() -> None:
    contest = CONTESTS["chain-fit"]

    def reached(ours: float, alone: float, limit: float) -> list[bool | None]:
        seconds = dict(zip((FLEET, *contest.either), (ours, alone, limit), strict=True))
        results = [Result(peer, 0.0, (own,), 8) for peer, own in seconds.items()]
        found = [ratio(contest, results, result) for result in results[1:]]
        return [None if one is None else one.reached for one in found]

    assert reached(1.0, 1.7, 0.5) == [True, True]  # 1.6 × as fast, however fast the limit is
    assert reached(1.0, 1.2, 0.95) == [True, True]  # slower, but as fast as this machine can be
    assert reached(1.0, 1.2, 0.5) == [False, False]


def test_the_picture_of_a_timeline_is_that_of_a_real_run(tmp_path: Path) -> None:
    timeline.draw(timeline.train(quick=True), tmp_path / "picture.svg")
    text = (tmp_path / "picture.svg").read_text(encoding="utf-8")
    assert all(word in text for word in ("measured", "planned", "encoder", "head", "cpu:1"))


def test_the_theory_of_schedules() -> None:
    assert chain_schedules.idle_by_theory("1f1b") == pytest.approx(1 / 9)
    assert chain_schedules.idle_by_theory("interleaved") == pytest.approx(1 / 17)
    measure = {who: chain_schedules.prepare(who, True) for who in (FLEET, THEORY)}
    ours, theory = (measure[who]("gpipe").notes for who in (FLEET, THEORY))
    assert ours.keys() == theory.keys()
    for rank in (0, 1):
        name = f"MB of activations on cpu:{rank}"
        assert 0.7 * theory[name] < ours[name] <= theory[name]


def test_a_cut_is_timed_beside_the_best_one() -> None:
    ours, best = (split_cut.prepare(who, True)("mlp") for who in (FLEET, BEST_CUT))
    assert ours.notes["cuts"] == 2
    assert ours.notes["cut"] in (1, 2)
    assert best.notes["best cut"] in (1, 2)
    assert min(ours.seconds or 0.0, best.seconds or 0.0) > 0


def test_every_entrant_has_its_module() -> None:
    for contest in CONTESTS.values():
        assert FLEET in contest.entrants
        assert set(contest.bars) <= set(contest.entrants) - {FLEET}
        assert set(contest.case_bars) <= set(contest.cases)
        assert contest.bars or contest.most_seconds
        for entrant in contest.entrants.values():
            assert find_spec(f"benchmarks.peers.{entrant.module}") is not None


def cases() -> Contest:
    entrants = {FLEET: Entrant("fleet", ()), PLAIN: Entrant("torch_loop", ())}
    return Contest(
        "cases", "two cases", entrants, {PLAIN: 0.95}, cases=("small", "large"), case_bars={"large": 5}, rounds=2
    )


def test_a_case_may_have_its_own_bar() -> None:
    small, large = cases().each_case()
    assert (small.case, small.bar(PLAIN)) == ("small", 0.95)
    assert (large.case, large.bar(PLAIN)) == ("large", 5)
    assert large.bar(FLEET) is None


class ScriptedPeer:
    """Answers as a peer does, and records what it was asked and with which caches."""

    asked: list[tuple[str, str, str | None]]

    def __init__(self, module: str, *arguments: str, environment: dict[str, str]) -> None:
        self.module, self.cache = module, environment.get("TORCHINDUCTOR_CACHE_DIR")

    def __enter__(self) -> "ScriptedPeer":
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def close(self) -> None:
        pass

    def answer(self, limit: float) -> dict[str, Any]:
        return {"warm_up": 0.0}

    def ask(self, limit: float, case: str = "") -> dict[str, Any]:
        self.asked.append((self.module, case, self.cache))
        if self.module == "torch_loop" and case == "large":
            raise harness.PeerError("failed: too large")
        return {"seconds": 2.0, "member_steps": 10, "loss": 0.0, "memory": 0.0}


@pytest.mark.parametrize("fresh", [True, False])
def test_the_peers_take_turns_case_by_case(monkeypatch: pytest.MonkeyPatch, fresh: bool) -> None:
    monkeypatch.setattr(ScriptedPeer, "asked", [], raising=False)
    monkeypatch.setattr(harness, "Peer", ScriptedPeer)
    contest = replace(cases(), fresh=fresh, rounds=1)
    (small, found), (large, failed) = harness.measure_contest(contest, quick=False, say=lambda text: None)
    assert [(module, case) for module, case, _ in ScriptedPeer.asked] == [
        (module, case) for case in ("small", "large") for module in ("fleet", "torch_loop")
    ]
    caches = [cache for *_, cache in ScriptedPeer.asked]
    # A fresh round finds nothing that another has cached; the others keep the caches of the machine.
    assert len(set(caches)) == (4 if fresh else 1)
    assert (None in caches) is not fresh
    assert (small.case, large.case) == ("small", "large")
    assert {result.peer: result.case for result in failed} == {FLEET: "large", PLAIN: "large"}
    assert "too large" in str(failed[1].problem)
    assert found[0].problem is None
    if fresh:  # in steady state a peer that fails is out, in all cases
        compared = ratio(small, found, found[1])
        assert compared is not None
        assert compared.value == 1


def test_a_table_of_cases_shows_what_was_missed() -> None:
    small, large = cases().each_case()
    limited = Contest("limit", "no peer", {}, {}, cases=("build",), most_seconds=5)
    lines: list[Any] = [
        (small, [Result(FLEET, seconds=(1.0,), member_steps=10), Result(PLAIN, seconds=(2.0,), member_steps=10)]),
        (large, [Result(FLEET, seconds=(1.0,), member_steps=10), Result(PLAIN, seconds=(0.4,), member_steps=1)]),
        (limited, [Result(FLEET, seconds=(6.0,), member_steps=10)]),
    ]
    console = Console(width=100, record=True, file=StringIO())
    show(Report(False, lines), console)
    shown = {line.split()[0]: line.split() for line in console.export_text().splitlines() if line.split()}
    assert shown["small"][-6:] == ["2", "×", "≥", "0.95", "×", "yes"]
    assert "4.00" in shown["large"]  # of the same work: ten times what the peer did
    assert shown["large"][-1] == "no"
    assert shown["build"][-4:] == ["≤", "5", "s", "no"]


def tiny_job() -> jobs.Job:
    random = np.random.default_rng(0)
    data = random.standard_normal((40, 20), dtype=np.float32), random.integers(0, 5, 40)
    arguments = {"width": [4, 4, 6], "dropout": [0.0, 0.5, 0.5]}
    return jobs.Job(jobs.mlp, arguments, [data], [1e-3, 1e-2, 3e-3], ["adam"] * 3, 2, 16, loop_epochs=1)


def test_a_job_counts_its_steps_and_the_loop_may_train_fewer_epochs() -> None:
    job = tiny_job()
    assert job.steps == 6
    assert jobs.by_loop(job).member_steps == 9
    found = jobs.by_fleet(job)
    assert found.member_steps == 18
    assert found.notes["largest difference to alone"] < 1e-4
    widths = replace(job.of([0, 1, 2]), make=jobs.mlp, arguments={"width": [4, 4, 6]})
    assert jobs.by_lanes(widths).member_steps == 18


def test_a_member_that_is_not_as_alone_is_refused() -> None:
    job = tiny_job()
    fleet, _ = jobs.train(job)
    with torch.no_grad():
        next(fleet["1"].parameters()).mul_(1.001)
    with pytest.raises(RuntimeError, match="member '1' is not as alone"):
        jobs.differences(job, fleet)


def test_the_sweep_has_every_combination_once() -> None:
    job = jobs.job_of("sweep", "30 epochs", quick=False)
    members = list(zip(job.rates, job.arguments["width"], job.arguments["dropout"], job.optimizers, strict=True))
    assert len(members) == len(set(members)) == 96
    assert job.steps == 720
    assert jobs.job_of("sweep-digits", "300 epochs", quick=False).data[0][0].shape == (1797, 8, 8)
    checked = [members[member] for member in job.sample()]
    assert [len(set(values)) for values in zip(*checked, strict=True)] == [3, 4, 4, 2]


def test_a_case_in_steps_is_that_many_steps() -> None:
    for name in ("mlp", "four", "equal"):
        assert jobs.job_of(name, "1,000 steps", quick=False).steps == 1000


def test_answers_of_a_fleet_are_compared_with_the_loop() -> None:
    data = predicting.dataset(8)
    for verb in ("predict", "evaluate"):
        for origin in ("built", "handed out"):
            predicting.call_of(FLEET, verb, origin, 2, data)()
    right = predicting.loop_evaluate(predicting.modules(2), data)
    with pytest.raises(AssertionError, match="1"):
        predicting.agree(right | {"1": {**right["1"], "loss": 9.0}}, right)
    with pytest.raises(ValueError, match="expected those of"):
        predicting.agree({"0": right["0"]}, right)


def test_members_stacked_by_hand_take_the_steps_of_torch() -> None:
    row = small("mlp-64")
    own = trainees(row, range(2))
    rates = torch.from_numpy(row.rates())
    hand = accelerators.ByHand([trainee.model for trainee in own], rates)
    batches = [(own[0].x[:8], own[0].y[:8]), (own[0].x[8:16], own[0].y[8:16])]
    for x, y in batches:
        losses = hand.step(torch.stack([x, x]), torch.stack([y, y]))
        for trainee, loss in zip(own, losses, strict=True):
            trainee.optimizer.zero_grad()
            expected = nn.functional.cross_entropy(trainee.model(x), y)
            expected.backward()
            trainee.optimizer.step()
            torch.testing.assert_close(loss, expected.detach())
    for name, stacked in hand.params.items():
        for trainee, found in zip(own, stacked, strict=True):
            torch.testing.assert_close(found, trainee.model.get_parameter(name).detach())


def test_the_table_for_accelerators_names_what_could_not_run(capsys: pytest.CaptureFixture[str]) -> None:
    accelerators.main(["mlp-64", "lstm", "--device", "cpu", "--quick"])
    lines = capsys.readouterr().out.splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    assert cells[0][1:] == list(accelerators.PEERS)
    mlp, lstm = cells[2:]
    assert all(float(cell) > 0 for cell in mlp[1:])
    assert lstm[3] == "–"
    assert "– torch.func by hand: torch.func can't map `nn.LSTM`." in lines
    with pytest.raises(SystemExit):
        accelerators.main(["strange", "--device", "cpu"])
