"""What newcomers do first: other libraries' words, splits, parts of a fleet, frames."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from tests.helpers import fit, fleet_of, toy
from torch import nn

import modelfleet as mf
from modelfleet.types import Strategy

X, Y = toy(40)


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda fleet: fleet.fit((X, Y), validation_data=(X, Y)), "Use validation"),
        (lambda fleet: fleet.fit((X, Y), verbose=0), "Use progress"),
        (lambda fleet: fleet.fit(X, Y), r"fleet.fit\(\(x, y\)\)"),
        (lambda fleet: fleet.fit((X, Y), epoch=3), "epochs"),
        (lambda fleet: fleet.fit((X, Y), epochs=[1, 2]), "mf.each"),
        (lambda fleet: fleet.predict(X, verbose=0), "verbose"),
    ],
)
def test_other_libraries_words_are_explained(call: object, told: str) -> None:
    assert callable(call)
    with pytest.raises(mf.InputError, match=told):
        call(fleet_of(2))


def test_early_stopping_without_validation_data_fails_before_the_first_step() -> None:
    fleet = fleet_of(2)
    before = fleet["0"][0].weight.clone()
    with pytest.raises(mf.InputError, match="val_loss"):
        fit(fleet, (X, Y), callbacks=[mf.EarlyStopping("val_loss")])
    assert torch.equal(fleet["0"][0].weight, before)


def test_a_validation_split_takes_the_last_rows() -> None:
    split, given = fleet_of(2), fleet_of(2)
    history = fit(split, (X, Y), validation_split=0.25, epochs=2, batch_size=8)
    expected = fit(given, (X[:30], Y[:30]), validation=(X[30:], Y[30:]), epochs=2, batch_size=8)
    assert history["0"] == expected["0"]
    own = mf.each([(X, Y), (X[:8], Y[:8])])
    assert "val_loss" in fit(split, own, validation_split=0.5)["1"]


@pytest.mark.parametrize(
    ("data", "split", "told"),
    [
        ((X, Y), 1.5, "between 0 and 1"),
        ((X[:1], Y[:1]), 0.5, "0 rows to train on"),
        ([(X, Y)], 0.5, "second loader"),
    ],
)
def test_a_split_that_can_not_be_is_refused(data: object, split: float, told: str) -> None:
    with pytest.raises(mf.InputError, match=told):
        fit(fleet_of(1), data, validation_split=split)


def test_a_list_of_names_is_a_fleet_that_goes_on_with_the_same_optimizer_state() -> None:
    whole, parted = fleet_of(3, optimizer="adam"), fleet_of(3, optimizer="adam")
    for fleet in (whole, parted):
        fit(fleet, (X, Y), epochs=2, batch_size=8)
    fit(whole, (X, Y), epochs=2, batch_size=8)
    some = parted[["0", "2"]]
    assert some.names == ["0", "2"]
    assert some["2"] is parted["2"]
    fit(some, (X, Y), epochs=2, batch_size=8)
    for name in some.names:
        assert torch.allclose(some[name][0].weight, whole[name][0].weight, atol=1e-6)
    # The models are those of the whole fleet, too.
    assert np.allclose(parted.predict(X)["2"], whole.predict(X)["2"], atol=1e-5)
    with pytest.raises(mf.InputError, match="stranger"):
        parted[["0", "stranger"]]


def test_a_history_s_frame_has_what_members_were_compiled_with() -> None:
    pytest.importorskip("pandas")
    fleet = fleet_of(2, lr=mf.each([0.1, 0.01]))
    frame = fit(fleet, (X, Y), epochs=2).frame()
    assert frame.groupby("member")["lr"].first().tolist() == [0.1, 0.01]
    assert set(frame["optimizer"]) == {"sgd"}


def test_plans_are_values() -> None:
    one, other = fleet_of(3), fleet_of(3)
    assert one.plan((X, Y), epochs=3) == other.plan((X, Y), epochs=3)
    assert one.plan((X, Y)) != one.plan((X, Y), strategy="interleaved")
    text = str(one.plan((X, Y), strategy="interleaved"))
    assert text.count('strategy="interleaved"') == 1, "equal reasons are shown once"
    assert "0–2" in text
    assert repr(one.plan()) == str(one.plan())


def raises(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    raise ValueError("no such thing")


def takes_one(output: torch.Tensor) -> torch.Tensor:
    return output.sum()


def gives_nothing(output: torch.Tensor, target: torch.Tensor) -> None:
    return None


def gives_text(output: torch.Tensor, target: torch.Tensor) -> str:
    return "good"


def gives_many(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return output


def linear(params: dict[str, np.ndarray], x: np.ndarray) -> np.ndarray:
    return x @ params["w"]


@pytest.mark.parametrize(
    ("metric", "told"),
    [
        (raises, r"the metric 'raises' raised ValueError: no such thing at test_newcomers\.py"),
        (takes_one, "the metric 'takes_one' raised TypeError"),
        (gives_nothing, "the metric 'gives_nothing' raised"),
        (gives_text, "the metric 'gives_text' raised TypeError"),
        (gives_many, "the metric 'gives_many' gave"),
        ({"mine": raises}, "the metric 'mine' raised"),
        ("r2", "r2 needs both of one shape"),
        ("top_9", "top_9 needs at least 9 classes"),
    ],
)
@pytest.mark.parametrize("strategy", ["fused", "interleaved"])
@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_a_metric_that_can_not_be_is_named_before_the_first_step(
    framework: str, strategy: Strategy, metric: Any, told: str
) -> None:
    fleet = fleet_of(2)
    if framework == "jax":
        pytest.importorskip("jax")
        fleet = mf.Fleet([({"w": np.eye(4, 3, dtype=np.float32)}, linear) for _ in range(2)])
    fleet.compile("sgd", "cross_entropy", lr=0.1, metrics=[metric])
    before = fleet.predict(X)["1"]
    with pytest.raises(mf.InputError, match=told):
        fit(fleet, (X, Y), strategy=strategy)
    assert np.array_equal(fleet.predict(X)["1"], before)


class Misspelt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.haed(x)  # pyrefly: ignore


def test_mistakes_are_told_by_their_own_cause() -> None:
    with pytest.raises(mf.InputError, match=r"the class Misspelt.*Misspelt\(\.\.\.\)"):
        mf.Fleet([Misspelt])
    fleet = mf.Fleet([Misspelt(), Misspelt()])
    fleet.compile("sgd", "cross_entropy", lr=0.1)
    with pytest.raises(mf.InputError, match=r"haed.* at test_newcomers\.py:\d+\. This is a mistake in the code"):
        fit(fleet, (X, Y))
    rows = list(zip(X, Y, strict=True))
    with pytest.raises(mf.InputError, match="stack the rows"):
        fit(fleet_of(2), rows)
    triples = torch.utils.data.TensorDataset(*map(torch.from_numpy, (X, Y, Y)))
    with pytest.raises(mf.InputError, match=r"more than \(x, y\)"):
        fit(fleet_of(2), torch.utils.data.DataLoader(triples, batch_size=8))


class Endless:
    """A data set that says it never ends, as a repeated `tf.data.Dataset` does."""

    def cardinality(self) -> int:
        return -1

    def __iter__(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        while True:
            yield X[:8], Y[:8]


def test_data_that_never_end_need_steps_per_epoch() -> None:
    fleet = fleet_of(2)
    with pytest.raises(mf.InputError, match=r"data is a data set that never ends.*steps_per_epoch"):
        fit(fleet, Endless())
    with pytest.raises(mf.InputError, match=r"validation is a data set that never ends.*take\(steps\)"):
        fit(fleet, (X, Y), validation=Endless())
    assert len(fit(fleet, Endless(), steps_per_epoch=3)["0"]["loss"]) == 1
