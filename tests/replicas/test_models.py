"""Which models can be asked: every dtype and kind of output, factories, functions, what torch can't pickle."""

import dataclasses
import random
import threading
import time
from collections import namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from tests.replicas import models
from torch import Tensor, nn

import modelfleet as mf
from modelfleet.frameworks.torch.cpu import malloc
from modelfleet.workers.supervisor import Supervisor

TWO = "cpu:0,cpu:1"


def rows(count: int, features: int = 4, dtype: Any = np.float64) -> np.ndarray:
    return (10 * np.random.default_rng(count).normal(size=(count, features))).astype(dtype)


def asked(model: Any, x: Any, devices: str = "cpu", **options: Any) -> Any:
    with mf.Replicas(model, devices=devices, **options) as replicas:
        return replicas.submit("ada", x).result()


def failed_rows(error: Exception) -> list[int]:
    assert isinstance(error, mf.RowsError)
    return list(error.rows)


def alone(model: nn.Module, x: np.ndarray) -> np.ndarray:
    with torch.no_grad():
        return model.eval()(torch.from_numpy(x)).numpy()


# --- dtypes ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("devices", ["cpu", TWO])
def test_a_float64_model_answers_in_float64(devices: str) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    x = rows(50)
    answer = asked(model, x, devices)
    assert answer.dtype == np.float64
    np.testing.assert_allclose(answer, alone(model, x), rtol=1e-15, atol=1e-15)


def test_the_default_dtype_of_the_owner_is_that_of_the_workers() -> None:
    torch.set_default_dtype(torch.float64)
    try:
        model, x = models.Filling(), rows(6)
        answer = asked(model, x, TWO)
        np.testing.assert_allclose(answer, alone(model, x), rtol=1e-15, atol=0)
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("given", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("own", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_rows_of_any_float_are_given_in_the_dtype_of_the_model(given: Any, own: torch.dtype) -> None:
    model, x = nn.Linear(4, 3).to(own), rows(5, dtype=given)
    with torch.no_grad():
        expected = model(torch.from_numpy(x).to(own))
    answer = asked(model, x)
    assert answer.dtype == (np.float32 if own == torch.bfloat16 else expected.numpy().dtype)
    np.testing.assert_array_equal(answer, expected.double().numpy())


class Same(nn.Module):
    """Gives what came."""

    def forward(self, x: Tensor) -> Tensor:
        return x


@pytest.mark.parametrize(
    "dtype", [np.float64, np.float32, np.float16, np.uint8, np.int64, np.bool_, np.complex64, np.complex128]
)
def test_a_model_without_weights_gets_the_rows_as_they_are(dtype: Any) -> None:
    x = rows(5).astype(dtype)
    answer = asked(Same(), x)
    assert answer.dtype == dtype
    np.testing.assert_array_equal(answer, x)


@pytest.mark.parametrize("dtype", [np.int8, np.int16, np.int32, np.int64])
def test_indices_of_any_width_find_their_rows(dtype: Any) -> None:
    model = nn.Embedding(9, 3)
    x = np.arange(9).astype(dtype)
    np.testing.assert_array_equal(asked(model, x), model.weight.detach().numpy())


class Mixed(nn.Module):
    """A first layer of one dtype, a second one of another."""

    def __init__(self, first: torch.dtype, second: torch.dtype) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4, dtype=first), nn.Linear(4, 2, dtype=second)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).to(self.second.weight.dtype))


@pytest.mark.parametrize(("first", "second"), [(torch.float32, torch.float64), (torch.float64, torch.float32)])
def test_a_model_of_two_dtypes_is_given_what_its_first_layer_takes(
    first: torch.dtype, second: torch.dtype
) -> None:
    model, x = Mixed(first, second), rows(7)
    expected = alone(model, x.astype(np.float32 if first == torch.float32 else np.float64))
    answer = asked(model, x)
    assert answer.dtype == expected.dtype
    np.testing.assert_array_equal(answer, expected)


class Turning(nn.Module):
    """Complex weights, and an answer that torch has not conjugated yet."""

    def __init__(self) -> None:
        super().__init__()
        self.phase = nn.Parameter(torch.tensor([1 + 2j], dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.phase).conj()


def test_complex_numbers_come_out() -> None:
    x = rows(5) + 1j * rows(5)
    answer = asked(Turning(), x)
    assert answer.dtype == np.complex64
    np.testing.assert_allclose(answer, np.conj(x * (1 + 2j)), rtol=1e-6)


# --- outputs --------------------------------------------------------------------------------------------------


Named = namedtuple("Named", ["score", "rank"])


@dataclasses.dataclass
class Found:
    """As models give them that are nobody's library."""

    score: Any
    more: Any = None


class Giving(nn.Module):
    """Gives whatever a function makes of its rows."""

    def __init__(self, make: Any) -> None:
        super().__init__()
        self.make = make

    def forward(self, x: Tensor) -> Any:
        return self.make(x)


def test_every_kind_of_container_comes_out() -> None:
    x = rows(5, dtype=np.float32)
    made = {
        "tuple": lambda x: (x, 2 * x),
        "named": lambda x: Named(x[:, 0], {"deep": [x, None]}),
        "dict": lambda x: {"logits": x, "features": 2 * x, "none": None},
        "record": lambda x: Found(x, more=Found(x[:, 1])),
    }
    found = {name: asked(Giving(make), x, batch_size=2) for name, make in made.items()}
    assert isinstance(found["tuple"], tuple)
    np.testing.assert_array_equal(found["tuple"][1], 2 * x)
    assert type(found["named"]) is Named
    np.testing.assert_array_equal(found["named"].rank["deep"][0], x)
    assert found["named"].rank["deep"][1] is None
    assert list(found["dict"]) == ["logits", "features", "none"]
    np.testing.assert_array_equal(found["dict"]["features"], 2 * x)
    np.testing.assert_array_equal(found["record"]["more"]["score"], x[:, 1])
    assert found["record"]["more"]["more"] is None


def boxes(x: Tensor) -> list[dict[str, Any]]:
    """For every row another number of boxes, as detectors give them."""
    return [{"boxes": row.expand(int(row[0]), 4), "label": f"row {int(row[0])}"} for row in x]


@pytest.mark.parametrize("devices", ["cpu", TWO])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_list_with_an_entry_per_row_is_dealt_out_row_by_row(devices: str, size: int) -> None:
    x = np.repeat(np.arange(1, 10, dtype=np.float32)[:, None], 4, axis=1)
    found = asked(Giving(boxes), x, devices, batch_size=size)
    assert found.shape == (9,)
    for number, entry in enumerate(found, 1):
        assert entry["label"] == f"row {number}"
        np.testing.assert_array_equal(entry["boxes"], np.full((number, 4), number))


@pytest.mark.parametrize("size", [1, 2, 3])
def test_as_many_outputs_as_rows_are_not_taken_for_an_entry_per_row(size: int) -> None:
    x = rows(size, dtype=np.float32)
    found = asked(Giving(lambda x: [x, x + 1]), x)
    assert len(found) == 2
    np.testing.assert_array_equal(found[1], x + 1)


def test_words_and_numbers_come_out_if_there_is_one_per_row() -> None:
    x = rows(5, dtype=np.float32)
    found = asked(
        Giving(lambda x: {"words": [f"{row[0]:.2f}" for row in x], "numbers": [float(row[0]) for row in x]}), x
    )
    assert found["words"].tolist() == [f"{row[0]:.2f}" for row in x]
    assert found["numbers"].dtype == np.float64
    np.testing.assert_array_equal(found["numbers"], x[:, 0])


def test_ragged_tensors_come_out_row_by_row() -> None:
    x = np.arange(1, 6, dtype=np.float32)[:, None]
    found = asked(Giving(lambda x: torch.nested.nested_tensor([row.expand(int(row)) for row in x])), x)
    assert [row.tolist() for row in found] == [[n] * n for n in range(1, 6)]


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda x: {"y": x, "loss": x.mean()}, "'loss' as ()"),
        (lambda x: {"y": x, "scale": 0.5}, "'scale' as 0.5 (a float)"),
        (lambda x: {"y": x, "name": "net"}, "'name' as 'net' (a str)"),
        (lambda x: (x, {"deep": [x, x, x, {1}]}), "'[1].deep[3]' as {1} (a set)"),
        (lambda x: {"y": x, "sums": x.sum(0)}, "'sums' as (4,)"),
        (lambda x: {"y": x, "sparse": x.to_sparse()}, "'sparse' as a sparse tensor"),
        (lambda x: {"nothing": None}, "expected arrays, one answer per row"),
    ],
)
def test_what_belongs_to_no_row_is_refused_by_name(make: Any, named: str) -> None:
    answers = mf.map(Giving(make), {"ada": rows(3, dtype=np.float32)}, devices="cpu", isolation="batch")
    (error,) = answers.failed.values()
    assert named in str(error)


class Recurrent(nn.Module):
    """Gives its last hidden states, `(layer, row, …)`."""

    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.GRU(4, 3, num_layers=2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.cells(x[:, None])[1]


@pytest.mark.parametrize(
    "model",
    [Recurrent(), lambda x: x.T @ x, lambda x: {"y": x, "w": np.eye(4)}, lambda x: np.array([x.mean()])],
    ids=["layers", "gram", "constant", "mean"],
)
@pytest.mark.parametrize("count", [1, 2, 4, 9])
def test_as_many_entries_as_rows_may_be_chance(model: Any, count: int) -> None:
    x = rows(count, dtype=np.float32)
    answers = mf.map(model, {"ada": x[:1], "bob": x[1:]}, devices="cpu", progress=False)
    refused = {"ada": 1, "bob": count - 1}
    assert {user: len(failed_rows(error)) for user, error in answers.failed.items()} == {
        user: number for user, number in refused.items() if number
    }
    assert "expected one answer per row" in str(answers.failed["ada"])


def test_a_function_that_leaves_out_bad_rows_answers_the_others() -> None:
    def positive(x: np.ndarray) -> list[float]:
        return [float(row[0]) for row in x if row[0] > 0]

    x = np.array([[1.0], [-1.0], [2.0], [3.0]])
    with mf.Replicas(positive, devices="cpu", batch_size=4) as replicas:
        with pytest.raises(mf.RowsError) as caught:
            replicas.submit("ada", x).result()
        assert list(caught.value.rows) == [1]
        np.testing.assert_array_equal(caught.value.answers, [1.0, 2.0, 3.0])
        np.testing.assert_array_equal(replicas.submit("bob", abs(x)).result(), [1.0, 1.0, 2.0, 3.0])


def test_masked_numbers_are_refused() -> None:
    masked = np.ma.array([[1.0], [2.0]], mask=[[False], [True]])
    answers = mf.map(lambda x: x, {"ada": masked, "bob": masked.data}, devices="cpu", progress=False)
    assert "1 of 2 numbers of a masked array are masked" in str(answers.failed["ada"])
    np.testing.assert_array_equal(answers["bob"], masked.data)
    hidden = mf.map(lambda x: np.ma.array(x, mask=x > 1), {"ada": masked.data}, devices="cpu", progress=False)
    assert failed_rows(hidden.failed["ada"]) == [1]
    with pytest.raises(mf.InputError, match="are masked"):
        mf.Fleet([nn.Linear(1, 1)]).predict(masked)


def by_size(x: np.ndarray) -> dict[str, np.ndarray]:
    both = {"mean": x.mean(1), "max": x.max(1)}
    return both if len(x) == 32 else dict(reversed(both.items()))


@pytest.mark.parametrize("devices", ["cpu", TWO])
def test_outputs_are_joined_by_their_keys_in_whatever_order_these_come(devices: str) -> None:
    x = rows(40)
    answers = mf.map(by_size, {"arrays": x, "stream": iter([x[:32], x[32:]])}, devices=devices, progress=False)
    for user in ("arrays", "stream"):
        np.testing.assert_array_equal(answers[user]["mean"], x.mean(1))
        np.testing.assert_array_equal(answers[user]["max"], x.max(1))


@pytest.mark.parametrize("devices", ["cpu", TWO])
@pytest.mark.parametrize(
    ("model", "told"),
    [
        (lambda x: {"large": x} if len(x) == 32 else {"small": x}, "a dict of 'large' in one of them and"),
        (lambda x: (x, x) if len(x) == 32 else x, "a list or tuple of 2 in one of them and an array"),
        (lambda x: np.full(len(x), 2**60 + 1) if len(x) == 32 else x[:, 0], "would be other numbers"),
        (lambda x: np.arange(len(x)) if len(x) == 32 else np.array(["a"] * len(x)), "they are <U1 and int64"),
    ],
    ids=["keys", "nesting", "numbers", "words"],
)
def test_outputs_that_differ_between_batches_are_refused(devices: str, model: Any, told: str) -> None:
    answers = mf.map(model, {"ada": rows(40), "bob": rows(40)}, devices=devices, progress=False)
    for user in ("ada", "bob"):
        if user in answers.failed:
            assert isinstance(answers.failed[user], mf.InputError)
            assert told in str(answers.failed[user])
    assert answers.failed  # of the two that share a batch, one may have all rows in batches of 32


def test_users_whose_rows_have_other_names_are_never_in_one_batch() -> None:
    def named(x: dict[Any, np.ndarray]) -> np.ndarray:
        return x[1] + 1 if 1 in x else x["1"] + 2

    x = rows(4)
    answers = mf.map(named, {"ada": {1: x}, "bob": {"1": x}}, devices="cpu", progress=False)
    np.testing.assert_array_equal(answers["ada"], x + 1)
    np.testing.assert_array_equal(answers["bob"], x + 2)


def test_whole_numbers_that_no_dtype_holds_come_out_exactly() -> None:
    answer = asked(lambda x: ([2**63, -1] * len(x))[: len(x)], rows(4))
    assert answer.tolist() == [2**63, -1] * 2


def test_outputs_of_hugging_face_lose_nothing_that_was_asked_for() -> None:
    transformers = pytest.importorskip("transformers")
    size = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
    config = transformers.BertConfig(vocab_size=20, **size)
    ids = np.random.default_rng(0).integers(0, 20, (5, 6))
    plain = transformers.BertForSequenceClassification(config)
    assert asked(plain, {"input_ids": ids}).shape == (5, 2)  # the logits, as there is nothing else
    plain.config.output_hidden_states = True
    found = asked(plain, {"input_ids": ids})
    assert found["logits"].shape == (5, 2)
    assert [layer.shape for layer in found["hidden_states"]] == [(5, 6, 16)] * 3
    gpt = transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=20, n_embd=16, n_layer=2, n_head=2))
    labelled = asked(gpt, {"input_ids": ids, "labels": ids})
    assert labelled.shape == (5, 6, 20)  # neither its cache nor the batch's loss


# --- factories ------------------------------------------------------------------------------------------------


class Holding(nn.Module):
    """Holds what can't be sent."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 2)
        self.lock = threading.Lock()

    def forward(self, x: Tensor) -> Tensor:
        with self.lock:
            return self.head(x)


def test_what_can_not_be_sent_is_made_by_a_factory_in_every_worker() -> None:
    with pytest.raises(mf.StrategyError, match="Or give a function without arguments that makes the model"):
        mf.Replicas(Holding(), devices=TWO)
    before = torch.get_rng_state()
    x = rows(40, dtype=np.float32)
    one = asked(Holding, x)
    assert torch.equal(torch.get_rng_state(), before)
    # All workers have drawn the same weights, and those that one device has.
    with mf.Replicas(Holding, devices=TWO, isolation="device") as replicas:
        answers = [replicas.submit(user, x) for user in range(4)]
        for answer in answers:
            np.testing.assert_allclose(answer.result(), one, rtol=1e-5, atol=1e-6)
        assert all(replica.rows for replica in replicas.stats().replicas.values())


def test_an_error_of_a_factory_is_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def make() -> Any:
        raise OSError("the weights' file is not here")

    starts: list[str] = []
    begin = Supervisor.start

    def counted(self: Supervisor, *given: Any) -> Any:
        starts.append(self.place.name)
        return begin(self, *given)

    monkeypatch.setattr(Supervisor, "start", counted)
    with pytest.raises(OSError, match="not here"):
        mf.map(make, {"ada": rows(3)})
    with pytest.raises(mf.FleetError, match="OSError: the weights' file is not here") as caught:
        mf.map(make, {"ada": rows(3)}, devices=TWO)
    cause = caught.value.__cause__
    assert isinstance(cause, OSError)
    assert "raise OSError" in "".join(cause.__notes__)
    assert sorted(starts) == ["cpu:0", "cpu:1"]


def test_a_factory_that_does_not_return_is_waited_for_no_longer_than_told() -> None:
    go_on = threading.Event()

    def make() -> Any:
        random.random()
        go_on.wait(600)
        return lambda x: x

    before = random.getstate()
    try:
        with pytest.raises(mf.FleetError, match=r"make had not made its model after 0.5 s.*larger start_timeout"):
            mf.map(make, {"ada": rows(3)}, start_timeout=0.5)
        assert random.getstate() == before
        with mf.Replicas(lambda x: 2 * x, start_timeout=0.5) as replicas:
            with pytest.raises(mf.FleetError, match="had not made its model"):
                replicas.update(make)
            assert replicas.submit("ada", np.ones((1, 1))).result().tolist() == [[2]], "the old model stays"
    finally:
        go_on.set()


def test_a_factory_may_make_what_can_be_asked_only() -> None:
    assert asked(lambda: lambda x: 2 * x, np.ones((3, 1))).tolist() == [[2], [2], [2]]
    with pytest.raises(mf.InputError, match=r"returned a builtins.int, which can.t answer rows"):
        mf.Replicas(lambda: 7)
    with pytest.raises(mf.InputError, match="the class Linear is not a model that can answer rows"):
        mf.Replicas(nn.Linear)
    with pytest.raises(mf.InputError, match=r"the function .* is not a model that can answer rows"):
        mf.Replicas(lambda x, y: x)


# --- what torch can't pickle ----------------------------------------------------------------------------------


class Branching(nn.Module):
    """Has something to script."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[0] > 3:
            return self.head(x)
        return self.head(x) * 1.0


def unpicklable() -> dict[str, Any]:
    normed = torch.nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
    spectral = torch.nn.utils.parametrizations.spectral_norm(nn.Linear(4, 3))
    return {
        "parametrized": nn.Sequential(normed, nn.ReLU(), spectral),
        "scripted": torch.jit.script(Branching()),
        "traced": torch.jit.trace(nn.Linear(4, 3).eval(), torch.ones(2, 4)),
        "frozen": torch.jit.freeze(torch.jit.script(Branching().eval())),
        "within": nn.Sequential(nn.Linear(4, 4), torch.jit.script(Branching())),
    }


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_scripted_and_parametrized_models_are_sent() -> None:
    x = rows(20, dtype=np.float32)
    for name, model in unpicklable().items():
        model.eval()
        with torch.no_grad():
            expected = model(torch.from_numpy(x))
        answer = asked(model, x, TWO)
        np.testing.assert_allclose(answer, expected.numpy(), rtol=1e-5, atol=1e-6, err_msg=name)


@pytest.mark.filterwarnings("ignore")
def test_dynamically_quantized_models_are_sent() -> None:
    if "fbgemm" not in torch.backends.quantized.supported_engines:
        pytest.skip("this build of torch has no quantized engine")
    plain = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3)).eval()
    model = torch.ao.quantization.quantize_dynamic(plain, {nn.Linear}, dtype=torch.qint8)
    x = rows(1, dtype=np.float32)
    np.testing.assert_allclose(asked(model, x, TWO), model(torch.from_numpy(x)).numpy(), rtol=1e-5, atol=1e-6)


# --- functions, and models with a `predict` ---------------------------------------------------------------------


class Means:
    """As scikit-learn's models are: fitted, then asked by `predict`."""

    def fit(self, x: np.ndarray, y: np.ndarray) -> "Means":
        self.labels = np.unique(y)
        self.means = np.stack([x[y == label].mean(0) for label in self.labels])
        return self

    def predict(self, x: np.ndarray) -> np.ndarray:
        return self.labels[((x[:, None] - self.means) ** 2).sum(-1).argmin(1)]


@pytest.mark.parametrize("devices", ["auto", TWO])
def test_functions_and_models_with_a_predict_are_asked(devices: str) -> None:
    x = rows(60)
    model = Means().fit(x, np.where(x[:, 0] > 0, "right", "left"))
    answers = mf.map(model, {"ada": x[:25], "bob": x[25:]}, devices=devices, progress=False)
    assert answers["ada"].tolist() == model.predict(x)[:25].tolist()
    doubled = mf.map(lambda x: {"twice": 2 * x["a"], "sum": x["a"].sum(1)}, {"ada": {"a": x}}, devices=devices)
    np.testing.assert_array_equal(doubled["ada"]["twice"], 2 * x)
    np.testing.assert_array_equal(doubled["ada"]["sum"], x.sum(1))


def test_models_of_scikit_learn_are_asked() -> None:
    ensemble = pytest.importorskip("sklearn.ensemble")
    x = rows(60)
    model = ensemble.RandomForestClassifier(8, random_state=0).fit(x, x[:, 0] > 0)
    np.testing.assert_array_equal(asked(model, x, TWO), model.predict(x))
    np.testing.assert_array_equal(asked(model.predict_proba, x), model.predict_proba(x))


def test_rows_may_be_words_for_a_function() -> None:
    words = ["one", "three", "seventeen"]
    assert asked(lambda words: np.strings.str_len(words), words).tolist() == [3, 5, 9]


def test_a_function_may_work_in_place() -> None:
    def doubled(x: np.ndarray) -> np.ndarray:
        x *= 2
        return x

    x = rows(5)
    before = x.copy()
    np.testing.assert_array_equal(mf.map(doubled, {"ada": x})["ada"], 2 * before)
    np.testing.assert_array_equal(x, before)


def test_functions_are_refused_where_they_can_not_be() -> None:
    with pytest.raises(mf.InputError, match="device 'cuda:0' does not exist: a plain function sees cpu"):
        mf.Replicas(np.exp, devices="cuda:0")
    with pytest.raises(mf.InputError, match="is for models of torch and JAX; this one is of python"):
        mf.Replicas(np.exp, precision="bf16")
    for model in (Means(), lambda x: x):
        with pytest.raises(mf.InputError, match=r"can't be trained here: mf.map and mf.Replicas take them"):
            mf.Fleet([model])


# --- memory ---------------------------------------------------------------------------------------------------


@pytest.fixture
def trims(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many verbs and replicas were at work whenever free pages were given back."""
    if malloc._libc() is None:
        pytest.skip("malloc is not glibc's here, or has the user's settings")
    monkeypatch.setattr(malloc, "IDLE_SECONDS", 0.0)
    wait_until(lambda: not malloc._keeping)  # of earlier tests
    found: list[int] = []
    trim = malloc._trim
    monkeypatch.setattr(malloc, "_trim", lambda: (trim(), found.append(malloc._scopes)))
    return found


def wait_until(done: Any) -> None:
    end = time.monotonic() + 60
    while not done():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_freed_pages_are_given_back_when_the_last_replica_is_done(trims: list[int]) -> None:
    model, x = nn.Linear(4, 2), rows(5)
    with mf.Replicas(model, devices="cpu") as outer:
        outer.submit("ada", x).result()
        asked(model, x)
        assert malloc._keeping
        assert trims == []
    wait_until(lambda: not malloc._keeping)
    assert trims == [0]


def test_freed_pages_are_given_back_after_a_verb(trims: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = mf.Fleet([nn.Linear(4, 1), nn.Linear(4, 1)])
    fleet.compile("sgd", "mse", lr=0.01)
    x = torch.randn(32, 4)
    seen: list[bool] = []

    class Looking(mf.Callback):
        """Whether pages are kept during the training."""

        def on_epoch_end(self, run: Any, *rest: Any) -> None:
            run.fleet.predict(x)  # a verb within: the pages are still kept
            seen.append(malloc._keeping)

    for number in (1, 2):
        fleet.fit((x, x[:, :1]), epochs=1, callbacks=[Looking()], progress=False)
        wait_until(lambda: not malloc._keeping)
        assert trims == [0] * number
    assert seen == [True, True]
    monkeypatch.setattr(malloc, "IDLE_SECONDS", 3600.0)
    for _ in range(3):  # one soon after the other: the pages of one are those of the next
        fleet.predict(x)
        assert malloc._keeping
    assert trims == [0, 0]
    monkeypatch.setattr(malloc, "IDLE_SECONDS", 0.0)
    wait_until(lambda: not malloc._keeping)
    assert trims == [0, 0, 0]
