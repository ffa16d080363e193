import base64
import json
import math
import pickle
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jupyter_client.manager import KernelManager

from modelfleet.directions import direction
from modelfleet.errors import InputError, MissingExtraError, StoreError
from modelfleet.failures import Failure
from modelfleet.history import History

NAN = math.nan


def made(series: dict[str, dict[str, list[float]]]) -> History:
    history = History(series)
    for name, values in series.items():
        for epoch in range(max(map(len, values.values()), default=0)):
            history.record(name, {metric: numbers[epoch] for metric, numbers in values.items()})
    return history


def test_a_member_has_one_value_per_metric_and_epoch() -> None:
    history = History(["a", "b"])
    history.record("a", {"loss": 2.0})
    history.record("a", {"loss": 1.0})
    assert history["a"] == {"loss": [2.0, 1.0]}
    assert history["b"] == {}
    assert history.epochs == 2
    assert list(history) == ["a", "b"]
    assert "b" in history
    assert "c" not in history


def test_a_metric_that_comes_late_or_leaves_is_nan_where_it_is_missing() -> None:
    history = History(["a"])
    history.record("a", {"loss": 3.0})
    history.record("a", {"loss": 2.0, "val_loss": 2.5})
    history.record("a", {"loss": 1.0})
    assert history["a"]["loss"] == [3.0, 2.0, 1.0]
    assert history["a"]["val_loss"] == pytest.approx([NAN, 2.5, NAN], nan_ok=True)


def test_an_unknown_member_is_an_error_that_names_the_nearest() -> None:
    history = History(["berlin", "paris"])
    for use in (
        lambda: history["berlim"],
        lambda: history.record("berlim", {"loss": 1.0}),
        lambda: history.fail("berlim", Failure(1, 1, "loss is NaN")),
    ):
        with pytest.raises(InputError, match=r"unknown member 'berlim'. Did you mean 'berlin'"):
            use()
    assert history.failed == {}


@pytest.mark.parametrize(
    "metric",
    [
        "loss",
        "val_loss",
        "mse",
        "val_mae",
        "rmse",
        "mean_squared_error",
        "cross_entropy",
        "perplexity",
        "log-loss",
    ],
)
def test_losses_and_errors_are_better_when_lower(metric: str) -> None:
    assert direction(metric) == "min"
    assert direction(metric, "max") == "max"


@pytest.mark.parametrize(
    "metric",
    ["accuracy", "val_accuracy", "top_5", "top5", "val_top_k", "top-3", "r2", "r2_score", "val_auc", "F1"],
)
def test_accuracies_and_scores_are_better_when_higher(metric: str) -> None:
    assert direction(metric) == "max"
    assert direction(metric, "min") == "min"


@pytest.mark.parametrize("metric", ["depth", "neg_mean_squared_error", "stop_5", "lossy", "entropy"])
def test_what_is_better_is_asked_for_where_the_name_does_not_say(metric: str) -> None:
    with pytest.raises(InputError, match=f'{metric}.*mode="min" or mode="max"'):
        direction(metric)
    assert direction(metric, "max") == "max"


def test_an_unknown_mode_is_an_error() -> None:
    with pytest.raises(InputError, match=r"unknown mode 'mim'. Did you mean 'min'"):
        direction("loss", "mim")


def test_best_goes_by_the_last_epoch_as_the_members_have_its_weights() -> None:
    history = made({"a": {"loss": [0.1, 0.9]}, "b": {"loss": [0.8, 0.5]}})
    assert history.best() == "b"
    assert history.ranking("loss") == [("b", 0.5), ("a", 0.9)]
    assert history.best("loss", mode="max") == "a"


def test_best_goes_by_the_epoch_whose_weights_were_given_back() -> None:
    history = made({"a": {"loss": [0.1, 0.9]}, "b": {"loss": [0.8, 0.5]}})
    history.kept["a"] = 1
    assert history.ranking() == [("a", 0.1), ("b", 0.5)]
    history.record("a", {"loss": 0.7})  # trained on: these weights are gone
    assert history.ranking() == [("b", 0.5), ("a", 0.7)]


def test_best_prefers_the_validation_loss_if_there_is_one() -> None:
    assert made({"a": {"loss": [1.0], "val_loss": [3.0]}, "b": {"loss": [2.0], "val_loss": [2.0]}}).best() == "b"


def test_best_takes_the_first_of_equals() -> None:
    history = made({"a": {"acc": [0.5]}, "b": {"acc": [0.7]}, "c": {"acc": [0.7]}})
    assert history.best("acc") == "b"
    assert history.best("acc", mode="min") == "a"


def test_best_leaves_out_the_failed_and_nan() -> None:
    history = made({"a": {"loss": [0.1]}, "b": {"loss": [NAN]}, "c": {"loss": [0.9]}, "d": {}})
    history.fail("a", Failure(1, 7, "loss is NaN"))
    assert history.ranking() == [("c", 0.9)]
    history.fail("c", Failure(1, 8, "loss is NaN"))
    with pytest.raises(InputError, match="no member has a number for 'loss': 2 of 4 failed"):
        history.best()


def test_best_of_an_unrecorded_metric_names_the_recorded_ones() -> None:
    history = made({"a": {"loss": [1.0], "val_accuracy": [0.5]}})
    with pytest.raises(InputError, match=r"'val_acuracy'. Did you mean 'val_accuracy'.*Known: loss, val_accuracy"):
        history.best("val_acuracy")
    with pytest.raises(InputError, match="no epoch has been recorded"):
        History(["a"]).best()


def test_frame_has_a_row_per_member_and_epoch() -> None:
    frame = made({"a": {"loss": [2.0, 1.0]}, "b": {"loss": [3.0], "acc": [0.5]}, "c": {}}).frame()
    assert list(frame.columns) == ["member", "epoch", "loss", "acc"]
    assert frame["member"].tolist() == ["a", "a", "b"]
    assert frame["epoch"].tolist() == [1, 2, 1]
    assert frame["loss"].tolist() == [2.0, 1.0, 3.0]
    assert frame["acc"].tolist() == pytest.approx([NAN, NAN, 0.5], nan_ok=True)


def test_frame_has_the_hyperparameters_of_every_member() -> None:
    own = {"a": {"lr": 0.1, "loss": "mse"}, "b": {"lr": 0.2, "depth": 3}, "gone": {"width": 8}}
    history = History(["a", "b", "c"], own)
    for name, losses in {"a": [2.0, 1.0], "b": [3.0], "c": [4.0]}.items():
        for loss in losses:
            history.record(name, {"loss": loss})
    frame = history.frame()
    assert list(frame.columns) == ["member", "epoch", "lr", "hyperparameter_loss", "depth", "loss"]
    assert frame["loss"].tolist() == [2.0, 1.0, 3.0, 4.0]  # the metric, not the hyperparameter
    assert frame["lr"].tolist() == pytest.approx([0.1, 0.1, 0.2, NAN], nan_ok=True)
    assert frame["depth"].tolist() == pytest.approx([NAN, NAN, 3, NAN], nan_ok=True)
    assert frame["hyperparameter_loss"].tolist()[:2] == ["mse", "mse"]


def test_a_later_fit_brings_its_hyperparameters() -> None:
    first, second = History(["a", "b"], {"a": {"lr": 0.1}, "b": {"lr": 0.2}}), History(["a"], {"a": {"lr": 0.3}})
    second.record("a", {"loss": 1.0})
    first.extend(second)
    assert first.hyperparameters == {"a": {"lr": 0.3}, "b": {"lr": 0.2}}


def test_a_missing_package_is_named_with_its_pip_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    history = made({"a": {"loss": [1.0]}})
    with pytest.raises(MissingExtraError, match=r"history.frame\(\).*pip install pandas$"):
        history.frame()
    with pytest.raises(MissingExtraError, match=r"history.plot\(\).*pip install matplotlib$"):
        history.plot()


def test_plot_draws_every_curve_and_marks_the_best_and_the_failed(tmp_path: Path) -> None:
    history = made({r"$\a$": {"loss": [2.0, 1.0]}, "b": {"loss": [2.0, 1.5]}, "c": {"loss": [3.0, 1e30, NAN]}})
    history.fail("c", Failure(3, 30, "loss is NaN"))
    figure = history.plot(path=tmp_path / "curves.png")
    (axes,) = figure.axes
    assert [text.get_text() for text in axes.texts] == ["$\\a$\n1"]
    assert len(axes.collections[0].get_paths()) == 3
    cross = next(line for line in axes.lines if line.get_marker() == "x")
    low, high = axes.get_ylim()
    epoch, height = np.asarray(cross.get_xydata(), float).squeeze()
    assert epoch == 2  # the last one with a number
    assert low <= height <= high < 3  # one explosion does not flatten the others
    assert axes.get_title(loc="left") == "loss: 3 members, 1 failed"
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_plot_highlights_nothing_where_nobody_is_known_to_be_best() -> None:
    history = made(
        {"a": {"depth": [2.0, 1.0], "loss": [NAN, NAN]}, "b": {"depth": [2.0, 3.0], "loss": [NAN, NAN]}}
    )
    assert not history.plot("depth").axes[0].texts
    assert not history.plot("loss").axes[0].texts
    assert history.plot("depth", mode="max").axes[0].texts[0].get_text() == "b\n3"
    with pytest.raises(InputError, match=r"unknown metric 'dept'. Did you mean 'depth'"):
        history.plot("dept")
    with pytest.raises(InputError, match="unknown mode"):
        history.plot("depth", mode="most")  # pyrefly: ignore[bad-argument-type]


def test_plot_shows_a_single_epoch_and_fades_with_the_number_of_members() -> None:
    few = made({str(i): {"loss": [float(i)]} for i in range(3)}).plot().axes[0]
    many = made({str(i): {"loss": [float(i)]} for i in range(500)}).plot().axes[0]
    dots = next(line for line in few.lines if np.shape(line.get_xydata()) == (3, 2))
    assert dots.get_marker() == "o"
    assert 0.01 < float(many.collections[0].get_alpha() or 0) < float(few.collections[0].get_alpha() or 0) < 1


def test_plot_needs_no_pyplot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    made({"a": {"loss": [1.0, 2.0]}}).plot()


def test_a_figure_can_be_pickled() -> None:
    figure = made({"a": {"loss": [1.0, 2.0]}}).plot()
    assert pickle.loads(pickle.dumps(figure)).axes[0].get_ylabel() == "loss"


@pytest.mark.parametrize("before", ["", "import matplotlib.pyplot\n", "%matplotlib inline\n"])
def test_a_notebook_shows_the_plot(before: str, tmp_path: Path) -> None:
    cell = f"""{before}
from modelfleet.history import History
history = History(["a"])
history.record("a", {{"loss": 1.0}})
history.plot()"""
    manager = KernelManager()
    manager.connection_file = str(tmp_path / "kernel.json")
    manager.start_kernel(cwd=str(tmp_path))
    try:
        client = manager.client()
        client.start_channels()
        try:
            client.wait_for_ready(timeout=120)
            shown: list[dict[str, Any]] = []
            client.execute_interactive(cell, timeout=120, output_hook=lambda m: shown.append(m["content"]))
        finally:
            client.stop_channels()
    finally:
        manager.shutdown_kernel(now=True)
    pictures = [content["data"] for content in shown if "data" in content]
    assert len(pictures) == 1, shown
    assert base64.b64decode(pictures[0]["image/png"]).startswith(b"\x89PNG")


@given(
    st.dictionaries(
        st.text(min_size=1),
        st.dictionaries(
            st.text(min_size=1), st.lists(st.floats(), min_size=2, max_size=2), min_size=1, max_size=2
        ),
        max_size=3,
    )
)
def test_a_history_survives_strict_json(series: dict[str, dict[str, list[float]]]) -> None:
    history = made(series)
    for name in series:
        history.fail(name, Failure(2, 11, "gradient is infinite"))
        history.stopped[name] = 2
        history.kept[name] = 1
    stored = json.loads(json.dumps(history.to_dict(), allow_nan=False))
    again = History.from_dict(stored)
    assert {name: again[name] for name in again} == {
        name: {metric: pytest.approx(numbers, rel=0, abs=0, nan_ok=True) for metric, numbers in values.items()}
        for name, values in series.items()
    }
    assert (again.failed, again.stopped, again.kept) == (history.failed, history.stopped, history.kept)


@pytest.mark.parametrize("stored", [{}, {"metrics": []}, {"metrics": {"a": {"loss": ["x"]}}}])
def test_a_foreign_dict_is_no_history(stored: dict[str, object]) -> None:
    with pytest.raises(StoreError, match="the stored history can't be read"):
        History.from_dict(stored)


def test_extend_appends_a_second_fit() -> None:
    first = made({"a": {"loss": [3.0, 2.0]}, "b": {"loss": [3.0, NAN]}, "c": {"loss": [3.0, 3.0]}})
    first.fail("b", Failure(2, 9, "loss is NaN"))
    first.stopped["c"] = 2
    first.kept["c"] = 1
    second = made({"a": {"loss": [1.0], "val_loss": [1.5]}, "b": {}, "c": {"loss": [2.5]}, "d": {"loss": [9.0]}})
    second.fail("a", Failure(1, 4, "gradient is infinite"))
    second.stopped["d"] = 1
    first.extend(second)
    assert first["a"]["loss"] == [3.0, 2.0, 1.0]
    assert first["a"]["val_loss"] == pytest.approx([NAN, NAN, 1.5], nan_ok=True)
    assert first["d"] == {"loss": [9.0]}
    assert first.failed == {"b": Failure(2, 9, "loss is NaN"), "a": Failure(3, 4, "gradient is infinite")}
    assert first.stopped == {"d": 1}  # c trained on
    assert first.kept == {}


def test_repr_tells_the_essentials() -> None:
    history = made({"a": {"loss": [1.0, 0.25]}, "b": {"loss": [1.0, 0.5]}})
    history.fail("b", Failure(2, 1_200, "loss is NaN"))
    history.stopped["a"] = 2
    text = "History(2 members, 2 epochs, metrics loss, best 'a' with loss 0.25, 1 failed, 1 stopped early)"
    assert repr(history) == text
    assert repr(History(["a"])) == "History(1 member, nothing recorded yet)"
    assert str(history.failed["b"]) == "epoch 2, step 1,200: loss is NaN"
