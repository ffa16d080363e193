"""Members of unequal widths in one lane compute what each computes alone, in float64 to ten digits."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from tests.frameworks.torch.widths.padded import (
    ROWS,
    WIDTHS,
    Wide,
    assert_as_alone,
    assert_close,
    build,
    data,
    found_in,
    only,
)
from torch import Tensor, nn
from torch.nn import functional as F

import modelfleet as mf
from modelfleet.frameworks.torch.widths.rules import RULES
from modelfleet.lanes import LaneBuilder, LaneSpec


@pytest.fixture(autouse=True)
def _float64() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


def _sequence(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(*layers)


def _mlp(width: int) -> nn.Module:
    return _sequence(nn.Linear(6, width), nn.ReLU(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 3))


def _several_sizes(width: int) -> nn.Module:
    return _sequence(nn.Linear(6, 2 * width), nn.ReLU(), nn.Linear(2 * width, width + 1), nn.Linear(width + 1, 3))


def _layer_norm(width: int) -> nn.Module:
    return _sequence(nn.Linear(6, width), nn.LayerNorm(width), nn.ReLU(), nn.Linear(width, 3))


def _rms_norm(width: int) -> nn.Module:
    return _sequence(nn.Linear(6, width), nn.RMSNorm(width), nn.ReLU(), nn.Linear(width, 3))


def _batch_norm(width: int) -> nn.Module:
    layers = nn.Linear(6, width, bias=False), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, 3)
    return _sequence(*layers)


def _dropout(width: int) -> nn.Module:
    layers = nn.Linear(6, width), nn.ReLU(), nn.Dropout(0.4), nn.Linear(width, width), nn.AlphaDropout(0.2)
    return _sequence(*layers, nn.Linear(width, 3))


def _activation(kind: Callable[[], nn.Module]) -> Callable[[int], nn.Module]:
    return lambda width: _sequence(
        nn.Linear(6, width), kind(), nn.Linear(width, width), kind(), nn.Linear(width, 3)
    )


def _cnn(width: int) -> nn.Module:
    return _sequence(
        nn.Unflatten(1, (1, 2, 3)),
        nn.Conv2d(1, width, 3, padding=1, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        nn.Conv2d(width, 2 * width, 3, padding=1),
        nn.MaxPool2d((1, 2)),
        nn.Dropout2d(0.3),
        nn.Flatten(),
        nn.Linear(4 * width, 3),
    )


def _depthwise(width: int) -> nn.Module:
    return _sequence(
        nn.Unflatten(1, (1, 2, 3)),
        nn.Conv2d(1, width, 1),
        nn.Conv2d(width, width, 3, padding=1, groups=width),
        nn.GroupNorm(1, width),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(width, 3),
    )


def _residual(width: int) -> nn.Module:
    def run(net: Any, x: Tensor) -> Tensor:
        x = net.first(x)
        for block in net.blocks:
            x = x + block(x)
        return net.last(x)

    blocks = nn.ModuleList(
        _sequence(nn.Linear(width, 2 * width), nn.SiLU(), nn.Linear(2 * width, width)) for _ in "ab"
    )
    return Wide(width, {"first": nn.Linear(6, width), "blocks": blocks, "last": nn.Linear(width, 3)}, run)


def _embedding(width: int) -> nn.Module:
    def run(net: Any, x: Tensor) -> Tensor:
        ids = (x * 3).round().long() % 5
        return net.last(net.embed(ids).mean(1))

    return Wide(width, {"embed": nn.Embedding(5, width), "last": nn.Linear(width, 3)}, run)


def _tied(width: int) -> nn.Module:
    def run(net: Any, x: Tensor) -> Tensor:
        return F.linear(torch.tanh(net.first(x)), net.first.weight.T)[:, :3]

    return Wide(width, {"first": nn.Linear(6, width)}, run)


def _attention(width: int) -> nn.Module:
    """Attention of as many heads as the width, each of size 2, over six tokens."""

    def run(net: Any, x: Tensor) -> Tensor:
        x = net.first(x.unsqueeze(-1))
        query, key, value = (part(x).view(*x.shape[:2], -1, 2).transpose(1, 2) for part in net.parts)
        found = F.scaled_dot_product_attention(query, key, value)
        return net.last(net.norm(found.transpose(1, 2).flatten(2)).mean(1))

    parts = nn.ModuleList(nn.Linear(width, 2 * width) for _ in "qkv")
    last = nn.Linear(2 * width, 3)
    return Wide(
        width, {"first": nn.Linear(1, width), "parts": parts, "norm": nn.LayerNorm(2 * width), "last": last}, run
    )


def _scaled(width: int) -> nn.Module:
    """Softmax over the hidden units, scaled by the width."""

    def run(net: Any, x: Tensor) -> Tensor:
        x = net.first(x)
        gate = torch.softmax(x / x.shape[-1] ** 0.5, -1)
        return net.last(x * gate * net.width) + F.log_softmax(x, 1).mean(1, keepdim=True)

    return Wide(width, {"first": nn.Linear(6, width), "last": nn.Linear(width, 3)}, run)


def _reductions(width: int) -> nn.Module:
    def run(net: Any, x: Tensor) -> Tensor:
        x = net.first(x)
        found = [x.mean(-1), x.sum(-1), x.var(-1), x.std(-1), x.amax(-1), x.min(-1).values, x.norm(dim=-1)]
        found += [
            torch.logsumexp(x, -1),
            (0.1 * x + 1).prod(-1),
            (x.exp() + 1).log().mean(-1),
            (x * x + 1).rsqrt().sum(-1),
        ]
        return net.last(torch.stack(found, 1))

    return Wide(width, {"first": nn.Linear(6, width), "last": nn.Linear(11, 3)}, run)


def _joined(width: int) -> nn.Module:
    """Concatenation and gates along a padded axis."""

    def run(net: Any, x: Tensor) -> Tensor:
        first = F.relu(net.first(x))
        both = torch.cat([first, x, net.second(first)], -1)
        left, right = net.third(both).chunk(2, -1)
        return net.last(F.glu(torch.cat([left * torch.sigmoid(right), left], -1)) + torch.ones(net.width))

    parts = {"first": nn.Linear(6, width), "second": nn.Linear(width, 2 * width), "last": nn.Linear(width, 3)}
    return Wide(width, {**parts, "third": nn.Linear(3 * width + 6, 2 * width)}, run)


def _noise(width: int) -> nn.Module:
    def run(net: Any, x: Tensor) -> Tensor:
        x = net.first(x)
        x = x + 0.1 * torch.randn_like(x) if net.training else x
        return net.last(x + torch.rand(net.width) * 0.1 + torch.zeros(1, net.width))

    return Wide(width, {"first": nn.Linear(6, width), "last": nn.Linear(width, 3)}, run)


def _heads(width: int) -> nn.Module:
    """Two heads of unequal sizes."""

    def run(net: Any, x: Tensor) -> Tensor:
        x = net.first(x)
        return net.last(torch.softmax(x.view(len(x), 2, -1), -1).flatten(1))

    return Wide(width, {"first": nn.Linear(6, 2 * width), "last": nn.Linear(2 * width, 3)}, run)


def _zero_head(width: int) -> nn.Module:
    net = _mlp(width)
    for parameter in list(net.parameters())[-2:]:
        nn.init.zeros_(parameter)
    return net


FUSED = {
    "mlp": _mlp,
    "several sizes": _several_sizes,
    "layer norm": _layer_norm,
    "rms norm": _rms_norm,
    "batch norm": _batch_norm,
    "dropout": _dropout,
    "gelu": _activation(nn.GELU),
    "sigmoid": _activation(nn.Sigmoid),
    "softplus": _activation(nn.Softplus),
    "elu": _activation(nn.ELU),
    "prelu": _activation(nn.PReLU),
    "softmax": _activation(lambda: nn.Softmax(-1)),
    "cnn": _cnn,
    "depthwise": _depthwise,
    "residual": _residual,
    "embedding": _embedding,
    "tied": _tied,
    "attention": _attention,
    "scaled": _scaled,
    "reductions": _reductions,
    "joined": _joined,
    "noise": _noise,
    "heads": _heads,
    "zero head": _zero_head,
}


@pytest.mark.parametrize("kind", FUSED)
def test_padded_members_compute_what_they_compute_alone(kind: str) -> None:
    assert_as_alone(FUSED[kind])


OPTIMIZERS = ("sgd", "adam", "adamw", "rmsprop", "adagrad", "adadelta", "nadam", "radam", "adamax", "lion")


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_optimizer_leaves_the_padding_at_zero(optimizer: str) -> None:
    recipe: dict[str, Any] = {"lr": 0.01, "weight_decay": 0.1, "clip_norm": 0.5}
    fleet = mf.Fleet.build(lambda width: _layer_norm(int(width)), len(WIDTHS), width=mf.each(WIDTHS))
    fleet.compile(optimizer, "cross_entropy", **recipe)
    x, y = data()
    fleet.fit((x, y), epochs=2, batch_size=8, strategy="fused", progress=False)
    for name in fleet.names:
        alone = mf.Fleet.build(lambda width: _layer_norm(int(width)), len(WIDTHS), width=mf.each(WIDTHS))
        alone.compile(optimizer, "cross_entropy", **recipe)
        only(alone, name).fit((x, y), epochs=2, batch_size=8, progress=False)
        for key, value in alone[name].state_dict().items():
            torch.testing.assert_close(fleet[name].state_dict()[key], value, rtol=1e-10, atol=1e-10)


def _slopes(width: int) -> nn.Module:
    layers = nn.Linear(6, width), nn.LeakyReLU(0.5 / width), nn.Dropout(0.4 if width > 7 else 0.1)
    return _sequence(*layers, nn.Linear(width, width), nn.Softplus(1 + width / 10), nn.Linear(width, 3))


def _norms(width: int) -> nn.Module:
    layers = nn.BatchNorm1d(width, momentum=1 / width), nn.Linear(width, width), nn.LayerNorm(width)
    first = nn.Linear(6, width, bias=False)  # its gradient would be zero, and Adam follows the rounding of it
    return _sequence(first, *layers, nn.ELU(1 / width, inplace=True), nn.Linear(width, 3))


def _temperature(width: int) -> nn.Module:
    def run(net: Any, x: Tensor) -> Tensor:
        return net.last(torch.softmax(net.first(x) / (1 + net.width / 10), -1).clamp(max=1 - 1 / net.width))

    return Wide(width, {"first": nn.Linear(6, width), "last": nn.Linear(width, 3)}, run)


NUMBERS = {"slopes": _slopes, "norms": _norms, "temperature": _temperature}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("optimizer", ["sgd", "adam", mf.each(["adam", "sgd", "adam", "rmsprop"])])
@pytest.mark.parametrize("kind", NUMBERS)
def test_numbers_differ_beside_the_widths(kind: str, optimizer: Any, dtype: torch.dtype) -> None:
    torch.set_default_dtype(dtype)
    losses = [nn.CrossEntropyLoss(label_smoothing=0.1 * number) for number in range(len(WIDTHS))]
    assert_as_alone(NUMBERS[kind], optimizer=optimizer, loss=mf.each(losses))


@pytest.mark.parametrize("kind", FUSED)
def test_padded_members_in_float32(kind: str) -> None:
    torch.set_default_dtype(torch.float32)
    assert_as_alone(FUSED[kind])


def test_many_widths() -> None:
    assert_as_alone(_dropout, [3 + number for number in range(12)])


def test_batches_of_unequal_sizes_and_sample_weights() -> None:
    x, y = data()
    weights = np.linspace(0.1, 2, ROWS)
    fleet = build(_layer_norm, WIDTHS)
    fleet.fit((x, y, weights), epochs=2, batch_size=7, strategy="fused", progress=False)
    for name in fleet.names:
        alone = only(build(_layer_norm, WIDTHS), name)
        alone.fit((x, y, weights), epochs=2, batch_size=7, progress=False)
        for key, value in alone[name].state_dict().items():
            torch.testing.assert_close(fleet[name].state_dict()[key], value, rtol=1e-10, atol=1e-10)


def test_a_member_that_fails_and_one_that_stops_early_leave_the_others_alone() -> None:
    x, y = data()
    rates = [0.05, 1e200, 0.05, 0.05]
    fleet = build(_dropout, WIDTHS, lr=mf.each(rates))
    fit: dict[str, Any] = {"batch_size": 8, "progress": False}
    epochs = mf.each([3, 3, 1, 3])
    history = fleet.fit((x, y), epochs=epochs, strategy="fused", **fit)
    assert set(history.failed) == {"1"}
    for name, count in (("0", 3), ("2", 1), ("3", 3)):
        alone = only(build(_dropout, WIDTHS), name)
        own = alone.fit((x, y), epochs=count, **fit)
        assert_close(found_in(fleet, name, history, x), found_in(alone, name, own, x))


def test_saved_members_go_on_alone_and_back(tmp_path: Any) -> None:
    x, y = data()
    fit: dict[str, Any] = {"batch_size": 8, "progress": False}

    def build() -> mf.Fleet:
        fleet = mf.Fleet.build(lambda width: _layer_norm(int(width)), len(WIDTHS), width=mf.each(WIDTHS))
        fleet.compile("adam", "cross_entropy", lr=0.01)
        return fleet

    unbroken = build()
    unbroken.fit((x, y), epochs=3, strategy="fused", **fit)
    fleet = build()
    fleet.fit((x, y), epochs=1, strategy="fused", **fit)
    fleet.save(tmp_path / "saved")
    loaded = mf.load(tmp_path / "saved", factory=lambda width: _layer_norm(int(width)))
    loaded.fit((x, y), epochs=1, strategy="interleaved", **fit)  # each in a lane of its own
    loaded.fit((x, y), epochs=1, strategy="fused", **fit)  # and all in one again
    for name in unbroken.names:
        for key, value in unbroken[name].state_dict().items():
            torch.testing.assert_close(loaded[name].state_dict()[key], value, rtol=1e-10, atol=1e-10)


def test_a_run_resumes_from_a_checkpoint(tmp_path: Any) -> None:
    x, y = data()

    class Break(mf.Callback):
        def __init__(self, step: int | None) -> None:
            self.step = step

        def on_step_end(self, run: Any) -> None:
            if run.step == self.step:
                raise RuntimeError("broken off")

    fit: dict[str, Any] = {"epochs": 4, "batch_size": 8, "progress": False, "strategy": "fused"}
    unbroken = build(_cnn, WIDTHS)
    unbroken.fit((x, y), **fit)
    fleet = build(_cnn, WIDTHS)
    with pytest.raises(RuntimeError, match="broken off"):
        fleet.fit((x, y), **fit, callbacks=[mf.Checkpoint(tmp_path), Break(7)])
    resumed = build(_cnn, WIDTHS)
    resumed.fit((x, y), **fit, callbacks=[mf.Checkpoint(tmp_path), Break(None)])
    for name in unbroken.names:
        for key, value in unbroken[name].state_dict().items():
            torch.testing.assert_close(resumed[name].state_dict()[key], value, rtol=0, atol=0)


def _branch(width: int) -> nn.Module:
    def run(net: Any, x: Tensor) -> Tensor:
        x = net.first(x)
        return net.last(torch.tanh(x) if net.width > 8 else torch.relu(x))

    return Wide(width, {"first": nn.Linear(6, width), "last": nn.Linear(width, 3)}, run)


def _hidden_branch(width: int) -> nn.Module:
    """A branch that shows only in the values."""

    def run(net: Any, x: Tensor) -> Tensor:
        x = net.first(x)
        return net.last(x * (2 if x.shape[-1] > 8 else 3))

    return Wide(width, {"first": nn.Linear(6, width), "last": nn.Linear(width, 3)}, run)


def _median(width: int) -> nn.Module:
    def run(net: Any, x: Tensor) -> Tensor:
        return net.last(net.first(x).median(-1, keepdim=True).values)

    return Wide(width, {"first": nn.Linear(6, width), "last": nn.Linear(1, 3)}, run)


APART = {
    "branch": (_branch, "torch.tanh where others call torch.relu|torch.relu where others call torch.tanh"),
    "median": (_median, "has no rule for a padded axis"),
}


@pytest.mark.parametrize("kind", APART)
def test_what_has_no_rule_is_not_fused_and_says_why(kind: str) -> None:
    make, reason = APART[kind]
    x, y = data()
    with pytest.raises(mf.StrategyError, match=reason):
        build(make, WIDTHS).fit((x, y), batch_size=8, strategy="fused", progress=False)
    fleet = build(make, WIDTHS * 6)  # enough to make one lane seem worth it
    history = fleet.fit((x, y), epochs=1, batch_size=8, progress=False)
    for name in ("0", "1"):
        alone = only(build(make, WIDTHS * 6), name)
        own = alone.fit((x, y), epochs=1, batch_size=8, progress=False)
        assert_close(found_in(fleet, name, history, x), found_in(alone, name, own, x))


def _kernel(width: int) -> nn.Module:
    layers = nn.Unflatten(1, (1, 6)), nn.Conv1d(1, 3, width % 5, padding="same"), nn.Flatten(), nn.Linear(18, 3)
    return _sequence(*layers)


def test_kernels_are_in_groups_of_one_size() -> None:
    assert len(build(_kernel, WIDTHS).plan().lanes) == 2


def test_numbers_that_follow_from_the_width_are_each_members_own() -> None:
    assert_as_alone(_hidden_branch)


def test_an_evaluation_that_has_no_rule_runs_one_by_one() -> None:
    def make(width: int) -> nn.Module:
        def run(net: Any, x: Tensor) -> Tensor:
            x = net.norm(net.first(x))
            middle = x.mean(-1, keepdim=True) if net.training else x.median(-1, keepdim=True).values
            return net.last(x - middle)

        parts = {"first": nn.Linear(6, width), "norm": nn.BatchNorm1d(width), "last": nn.Linear(width, 3)}
        return Wide(width, parts, run)

    assert_as_alone(make)


def test_members_that_finish_early_make_room() -> None:
    x, y = data()
    counts = [1, 4, 1, 1]
    fleet = build(_dropout, WIDTHS)
    fit: dict[str, Any] = {"batch_size": 8, "progress": False}
    history = fleet.fit((x, y), epochs=mf.each(counts), strategy="fused", **fit)
    for name, count in zip(fleet.names, counts, strict=True):
        alone = only(build(_dropout, WIDTHS), name)
        own = alone.fit((x, y), epochs=count, **fit)
        assert_close(found_in(fleet, name, history, x), found_in(alone, name, own, x))


def test_members_of_one_width_are_fused_where_unequal_ones_can_not_be() -> None:
    x, y = data()
    fleet = build(_median, [4, 5] * 8)
    fleet.fit((x, y), epochs=1, batch_size=8, progress=False)
    lanes = fleet.plan((x, y), batch_size=8).lanes
    assert [len(lane.members) for lane in lanes] == [8, 8]
    assert all(lane.fused for lane in lanes)


def test_a_rule_that_is_wrong_is_noticed_by_the_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = data()
    wrong = {**RULES, torch.sigmoid: lambda call: call.run()}
    monkeypatch.setattr("modelfleet.frameworks.torch.fused.steps.RULES", wrong)
    with pytest.raises(mf.StrategyError, match="does not compute what it computes alone: its gradient of"):
        build(_activation(nn.Sigmoid), WIDTHS).fit((x, y), batch_size=8, strategy="fused", progress=False)


def test_an_eps_of_zero_is_not_padded() -> None:
    x, y = data()
    fleet = mf.Fleet.build(lambda width: _mlp(int(width)), len(WIDTHS), width=mf.each(WIDTHS))
    fleet.compile("adam", "cross_entropy", lr=0.01, eps=0.0)
    with pytest.raises(mf.StrategyError, match="eps of 0"):
        fleet.fit((x, y), batch_size=8, strategy="fused", progress=False)


def test_models_that_changed_between_fits_are_read_again() -> None:
    x, y = data()
    fit: dict[str, Any] = {"batch_size": 8, "progress": False}
    fleet = build(_layer_norm, WIDTHS)
    alone = only(build(_layer_norm, WIDTHS), "2")
    for own, strategy in ((fleet, "fused"), (alone, "auto")):
        own.fit((x, y), strategy=strategy, **fit)
        with torch.no_grad():
            own["2"].get_parameter("0.weight").mul_(0.5)
        own.fit((x, y), strategy=strategy, **fit)
    for key, value in alone["2"].state_dict().items():
        torch.testing.assert_close(fleet["2"].state_dict()[key], value, rtol=1e-10, atol=1e-10)


def test_the_state_of_a_lane_goes_to_a_narrower_one() -> None:
    x, y = data()
    fleet = build(_batch_norm, [4, 12, 7])
    fleet.fit((x, y), batch_size=8, strategy="fused", progress=False)
    (lane,) = fleet._live_lanes.lanes
    groups = fleet._live_lanes.groups
    half = LaneBuilder().build(groups, LaneSpec(("0", "2"), True))  # as after running out of memory
    for names, state in lane.read_apart(["0", "2"], host=True):
        half.write(names, state)
    for name in ("0", "2"):
        ((_, found),), ((_, expected),) = half.read_apart([name]), lane.read_apart([name])
        for part in ("params", "buffers", "optimizer", "member"):
            assert found[part].keys() == expected[part].keys()
            for key, tensor in expected[part].items():
                torch.testing.assert_close(found[part][key], tensor, rtol=0, atol=0)
    assert {tuple(t.shape[1:]) for t in half.read(["0"])["params"].values()} == {(6, 7), (7,), (7, 3), (3,)}
