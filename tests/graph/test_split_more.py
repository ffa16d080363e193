"""What `mf.split` keeps of a model, what it refuses and with which words, and how stages travel."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.graph.split_models import CASES, Branching, Encoder, ResNet, images, make_gpt2, texts, words
from tests.graph.test_split import run
from torch import Tensor, nn
from torch.nn import functional as F

import modelfleet as mf
from modelfleet.frameworks.torch import copy_model, signature
from modelfleet.graph.split import cut_times
from modelfleet.workers.pickling import pickle_value


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))


X = np.random.default_rng(0).standard_normal((4, 4), dtype=np.float32)


class TwoLayers(nn.Module):
    """Two layers, and something between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.between(self.first(x)))

    def between(self, x: Tensor) -> Tensor:
        return x


def equal(cut: mf.Split, model: nn.Module, x: Any) -> None:
    torch.testing.assert_close(run(cut, x), model(x), rtol=0, atol=0)


def test_children_of_a_sequential_are_the_same_modules_with_their_hooks() -> None:
    model = net()
    model[1].register_forward_hook(lambda module, args, output: output * 3)
    cut = mf.split(model, 2, X)
    own = {module for stage in cut.stages.values() for module in stage.modules()}
    assert set(model) <= own
    equal(cut, model, torch.from_numpy(X))
    assert cut.reasons[0] == "cut between the children of its nn.Sequential"


def test_hooks_of_the_whole_model_run_in_its_stages() -> None:
    model = TwoLayers()
    model.register_forward_hook(lambda module, args, output: output + 1)
    equal(mf.split(model, 2, X), model, torch.from_numpy(X))


def test_a_module_that_branches_on_values_stays_whole() -> None:
    class Holder(TwoLayers):
        def __init__(self) -> None:
            super().__init__()
            self.branch = Branching()

        def between(self, x: Tensor) -> Tensor:
            return self.branch(x)

    model = Holder()
    cut = mf.split(model, 2, X)
    assert cut.reasons[0] == "cut between its modules (torch.fx)"
    for sign in (1, -1):
        equal(cut, model, sign * torch.ones(3, 4))


def test_a_model_that_branches_on_values_is_refused_with_the_line() -> None:
    class Branches(TwoLayers):
        def between(self, x: Tensor) -> Tensor:
            return x * 2 if x.sum() > 0 else x

    with pytest.raises(mf.InputError, match=r"test_split_more.py:\d+.*control flow.*Cut it by hand"):
        mf.split(Branches(), 2, X)


def test_a_model_that_fixes_the_number_of_rows_is_refused() -> None:
    class Fixed(TwoLayers):
        def between(self, x: Tensor) -> Tensor:
            return x.reshape(4, 4)

    with pytest.raises(mf.InputError, match=r"it takes 4 rows as in the example, but not 5"):
        mf.split(Fixed(), 2, X)


def test_a_model_that_counts_its_calls_is_refused() -> None:
    class Counting(TwoLayers):
        calls = 0

        def between(self, x: Tensor) -> Tensor:
            self.calls += 1
            return x * self.calls

    model = Counting()
    with pytest.raises(mf.InputError, match=r"depends on more than its inputs and weights"):
        mf.split(model, 2, X)
    assert model.calls == 0


def test_what_is_computed_without_gradients_stays_so() -> None:
    class Frozen(TwoLayers):
        def between(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                return torch.relu(x) * 2

    model = Frozen()
    cut = mf.split(model, 2, X)
    run(cut, torch.from_numpy(X)).sum().backward()
    assert model.first.weight.grad is None
    assert model.second.weight.grad is not None


def test_a_dropout_that_is_always_on_stays_on_in_evaluation() -> None:
    class Always(Encoder):
        def forward(self, words: Tensor) -> Tensor:
            return F.dropout(super().forward(words), 0.5)

    torch.manual_seed(0)
    model = Always(0.1).eval()
    cut = mf.split(model, 3, words(4))
    x = words(5)
    torch.manual_seed(1)
    expected = model(x)
    torch.manual_seed(1)
    assert torch.equal(run(cut, x), expected)
    assert (expected == 0).any()


def test_a_change_in_place_stays_with_what_it_changes() -> None:
    class InPlace(TwoLayers):
        def between(self, x: Tensor) -> Tensor:
            y = x * 2
            z = torch.exp(x)
            y[:, :2].add_(1)
            return y * z

    model = InPlace()
    for stages in (2, 3):
        equal(mf.split(model, stages, X), model, torch.from_numpy(X))


def test_modes_of_modules_are_kept() -> None:
    model = ResNet()
    model.get_submodule("blocks.1.norm").eval()
    cut = mf.split(model, 3, images(4))
    modes = {name: own.training for stage in cut.stages.values() for name, own in stage.named_modules()}
    assert not modes["blocks.1.norm"]
    assert modes["blocks.2.norm"]
    encoder = Encoder(0.1).eval()
    assert not any(own.training for s in mf.split(encoder, 2, words(4)).stages.values() for own in s.modules())


def test_a_tied_weight_stays_in_one_stage_and_the_reason_says_so() -> None:
    torch.manual_seed(0)
    model = make_gpt2()
    cut = mf.split(model, 2, texts(4))
    holders = [name for name, paths in cut.paths.items() if "transformer.wte.weight" in paths.values()]
    assert len(holders) == 1
    assert any("tie_word_embeddings=False" in reason for reason in cut.reasons)
    shared = nn.Linear(4, 4)
    with pytest.raises(mf.InputError, match=r"stages=2, .* 1 piece at most: .*used in several places"):
        mf.split(nn.Sequential(shared, nn.Tanh(), shared), 2, X)


def test_hugging_face_models_return_no_cache() -> None:
    torch.manual_seed(0)
    model: Any = make_gpt2(tie_word_embeddings=False, use_cache=True).eval()
    x = texts(4)
    cut = mf.split(model, 2, x)
    found, expected = run(cut, x), model(**x)
    assert type(found) is type(expected)
    assert "past_key_values" in expected
    assert "past_key_values" not in found
    assert torch.equal(found.logits, expected.logits)
    assert model.config.use_cache


def test_memory_decides_over_time() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 512), nn.Linear(512, 4), nn.Linear(4, 4))
    cut = mf.split(model, 2, X, memory=[1e9, 1.5e5])
    assert cut.memory[1] <= 1.5e5
    with pytest.raises(mf.InputError, match=r"memory=1 kB is too little for 2 stages: .* largest stage needs"):
        mf.split(model, 2, X, memory=1000)


def test_without_training_there_is_no_backward_and_less_memory() -> None:
    cut = mf.split(net(), 2, X, train=False)
    assert all(timing.backward == 0 for timing in cut.timings)
    assert sum(cut.memory) < sum(mf.split(net(), 2, X).memory)


def test_an_example_of_one_row_is_enough() -> None:
    model = Encoder()
    cut = mf.split(model, 2, words(1))
    equal(cut, model, words(3))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stages": 0}, r"stages=0; expected a whole number, 1 or more"),
        ({"stages": 2.0}, r"stages=2.0; expected a whole number"),
        ({"stages": 6}, r"stages=6, but the model can be cut into 5 pieces at most"),
        ({"example": X[:, :3]}, r"does not accept the example \(4, 3\) float32"),
        ({"memory": [1e9]}, r"memory has 1 numbers for 2 stages"),
        ({"memory": -1}, r"memory holds -1.0; expected bytes, more than 0"),
    ],
)
def test_bad_input_is_refused(options: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"stages": 2, "example": X, **options}
    with pytest.raises(mf.InputError, match=message):
        mf.split(net(), **arguments)


def test_a_split_prints_its_stages_and_what_arrives() -> None:
    text = str(mf.split(net(), 2, X))
    assert "Sequential in 2 stages" in text
    assert "64 B from the batch" in text
    assert "from stage0" in text


def test_every_cut_in_two_can_be_timed() -> None:
    times = cut_times(net(), X)
    assert len(times.seconds) == 4
    assert 0 <= times.chosen < 4
    assert all(first > 0 and second > 0 for first, second in times.seconds)


@pytest.mark.parametrize("name", ["sequential", "bert", "encoder"])
def test_stages_compute_the_same_in_another_process(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    torch.manual_seed(0)
    model = case.make().eval()
    x = case.inputs(3)
    cut = mf.split(model, 2, x)
    stages = list(cut.stages.values())
    inputs = [*x.values()] if isinstance(x, dict) else [x]
    first = [inputs[link.output] for link in cut.links if link.target == "stage0"]
    stream, views = pickle_value(stages, "the stages")
    files = [tmp_path / f"{number}" for number in range(len(views) + 1)]
    for file, part in zip(files, [stream, *views], strict=True):
        file.write_bytes(part)
    torch.save(first, tmp_path / "inputs.pt")
    script = (
        "import sys, pickle, torch; from pathlib import Path; "
        "parts = [bytearray(Path(name).read_bytes()) for name in sys.argv[2:]]; "
        "stages = pickle.loads(parts[0], buffers=parts[1:]); folder = Path(sys.argv[1]); "
        "found = stages[0](*torch.load(folder / 'inputs.pt')); torch.save(found, folder / 'found.pt')"
    )
    subprocess.run([sys.executable, "-c", script, str(tmp_path), *map(str, files)], check=True)
    found, expected = torch.load(tmp_path / "found.pt"), stages[0](*first)
    parts = zip(found, expected, strict=True) if isinstance(found, tuple) else [(found, expected)]
    assert all(torch.equal(one, other) for one, other in parts)


def test_stages_can_be_members_of_a_fleet() -> None:
    stages = [mf.split(net(), 2, X).stages["stage0"] for _ in range(2)]
    own = copy_model(stages[0])
    assert signature(own) == signature(stages[0])
    fleet = mf.Fleet({"a": stages[0], "b": own}, devices="cpu")
    answers = fleet.predict(X)
    np.testing.assert_array_equal(answers["a"], answers["b"])
