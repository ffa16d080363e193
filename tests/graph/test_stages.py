"""Stages that are written in unusual ways have the numbers of the undivided model."""

import copy
from typing import Any

import pytest
import torch
from tests.graph.comparing import (
    HYBRID,
    THREE,
    TWO,
    assert_as_undivided,
    assert_same_weights,
    chain_of,
    fit,
    rows,
    stages,
    undivided,
    weights,
)
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

WAYS = [
    {"pipeline": "1f1b"},
    {"pipeline": "gpipe", "recompute": True},
    {"pipeline": "zero-bubble"},
    {"pipeline": "zero-bubble", "recompute": True, "micro_batches": 3},
    {"micro_batches": 1},
]
ways = pytest.mark.parametrize("options", WAYS, ids=lambda way: "-".join(map(str, way.values())))


class InPlaceFirst(nn.Module):
    """Begins with an operation in place on what it is given, and ends with one on what it returns."""

    def forward(self, x: Tensor) -> Tensor:
        x.mul_(2.0)
        return F.hardtanh_(x.add_(1.0), -0.5, 2.0)


class Views(nn.Module):
    """Returns a view of its input, transposed."""

    def forward(self, x: Tensor) -> Tensor:
        return x.view(len(x), -1, 1).expand(-1, -1, 2).transpose(1, 2)[:, 0].reshape_as(x)


class TwoOut(nn.Module):
    """Returns a tuple: numbers, integers, a number without rows, and a flag."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 7).double()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return torch.tanh(self.linear(x)), x.argmax(1), self.linear.weight.square().sum()


class ThreeIn(nn.Module):
    """Takes a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(4, 7).double()

    def forward(self, h: Tensor, index: Tensor, size: Tensor) -> dict[str, Tensor | None]:
        return {"h": h + self.table(index), "scale": 1 + size, "nothing": None}


class DictIn(nn.Module):
    """Takes a dict as keywords."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(7, 3).double()

    def forward(self, h: Tensor, scale: Tensor, nothing: None = None) -> Tensor:
        return self.linear(h) / scale


class Row(nn.Module):
    """Calls models one after another, as a chain does: tuples as arguments, dicts as keywords."""

    def __init__(self, models: list[nn.Module]) -> None:
        super().__init__()
        for index, model in enumerate(models):
            self.add_module(str(index), model)

    def forward(self, x: Tensor) -> Tensor:
        value: Tensor | tuple | dict = x
        for model in self.children():
            if isinstance(value, tuple):
                value = model(*value)
            else:
                value = model(**value) if isinstance(value, dict) else model(value)
        assert isinstance(value, Tensor)
        return value


class Twice(nn.Module):
    """Uses one layer twice, and one weight in two ways."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width).double()

    def forward(self, x: Tensor) -> Tensor:
        weight = F.normalize(self.layer.weight)
        return self.layer(torch.tanh(self.layer(x))) @ weight + torch.tanh(x) @ weight


class ManyOut(nn.Module):
    """Returns tensors of which some share a path to its weights that leads to no input."""

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Parameter(torch.ones(7, dtype=torch.float64))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        shared = torch.exp(torch.sin(self.own))
        return x * shared, (shared * 2).expand(len(x), -1), (shared + 1).expand(len(x), -1)


class Sum(nn.Module):
    def forward(self, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        return torch.tanh(a) + b * c


@ways
def test_operations_in_place_and_views(options: dict) -> None:
    first, second, third = stages()
    first, second = nn.Sequential(first, nn.Linear(7, 7).double()), nn.Sequential(second, nn.Linear(6, 6).double())
    models = [first, nn.Sequential(InPlaceFirst(), Views()), second, nn.Sequential(InPlaceFirst(), third)]
    assert_as_undivided(models, rows(), devices=TWO, options=options)


@ways
@pytest.mark.parametrize("devices", [TWO, HYBRID])
def test_tuples_dicts_integers_and_numbers_without_rows(options: dict, devices: object) -> None:
    if devices is HYBRID and options.get("micro_batches") == 1:
        options = {**options, "micro_batches": 3}
    torch.manual_seed(0)
    models: list[nn.Module] = [TwoOut(), ThreeIn(), DictIn()]
    assert_as_undivided(models, rows(), devices=devices, whole=Row(copy.deepcopy(models)), options=options)


@ways
def test_a_weight_that_a_stage_uses_twice(options: dict) -> None:
    first, second, third = stages()
    assert_as_undivided([first, Twice(7), second, nn.Sequential(Twice(6), third)], rows(), options=options)


@ways
def test_outputs_that_share_a_path_to_weights(options: dict) -> None:
    first, second, third = stages()
    models = [first, ManyOut(), Sum(), second, third]
    assert_as_undivided(models, rows(), whole=Row(copy.deepcopy(models)), options=options)


@ways
def test_stages_without_parameters(options: dict) -> None:
    first, second, third = stages()
    models = [nn.Flatten(), first, nn.Identity(), second, nn.Tanh(), third, nn.Softmax(1)]
    assert_as_undivided(models, rows(), devices=THREE, options=options)


class CausalMask(nn.Module):
    """Gives the next stage a mask that has no rows, and one that has."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 8, dtype=torch.float64)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        length = tokens.shape[1]
        mask = torch.ones(length, length, dtype=torch.bool).triu(1)
        return self.table(tokens), mask, tokens == 0


class Layer(nn.Module):
    """A transformer's layer that passes its masks on."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout, batch_first=True, dtype=torch.float64)

    def forward(self, x: Tensor, mask: Tensor, padding: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.layer(x, mask, padding), mask, padding


class Pool(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 3, dtype=torch.float64)

    def forward(self, x: Tensor, mask: Tensor, padding: Tensor) -> Tensor:
        return self.linear((x * ~padding[..., None]).sum(1))


def transformer(dropout: float) -> list[nn.Module]:
    torch.manual_seed(0)
    return [CausalMask(), Layer(dropout), Layer(dropout), Pool()]


def sentences(count: int = 40) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(1, 11, (count, 6), generator=generator)
    lengths = torch.randint(2, 7, (count, 1), generator=generator)
    return torch.where(torch.arange(6) < lengths, tokens, 0), tokens[:, 0] % 3


@pytest.mark.parametrize("dropout", [0.0, 0.2])
@ways
def test_a_transformer_with_masks_on_its_edges(options: dict, dropout: float) -> None:
    models = transformer(dropout)
    assert_as_undivided(models, sentences(), whole=Row(copy.deepcopy(models)), devices=TWO, options=options)


class Noise(nn.Module):
    """Draws in ways that are not dropout: a number for each row, and some for all."""

    def forward(self, x: Tensor) -> Tensor:
        x = x + 0.1 * torch.randn_like(x) + 0.1 * torch.rand(len(x), 1, dtype=x.dtype)
        return x * torch.bernoulli(torch.full((x.shape[1],), 0.8, dtype=x.dtype))


@ways
def test_noise_is_that_of_the_undivided_model(options: dict) -> None:
    first, second, third = stages(dropout=0.2)
    assert_as_undivided([first, Noise(), second, nn.Sequential(Noise(), third)], rows(), options=options)


class Checkpointed(nn.Module):
    """Computes a part of itself again in its backward pass, with the dropout of its forward pass."""

    def __init__(self, inner: nn.Module, *, reentrant: bool) -> None:
        super().__init__()
        self.inner, self.reentrant = inner, reentrant

    def forward(self, x: Tensor) -> Any:
        return checkpoint(self.inner, x.requires_grad_(), use_reentrant=self.reentrant)


@ways
@pytest.mark.parametrize("reentrant", [False, True])
def test_stages_that_recompute_a_part_of_themselves_draw_the_same_again(options: dict, reentrant: bool) -> None:
    if reentrant and options.get("pipeline") == "zero-bubble":
        pytest.skip("torch: such a part has no halves of a backward pass")
    first, second, third = stages(dropout=0.4)
    inner = nn.Sequential(nn.Dropout(0.3), second, nn.Dropout(0.2))
    models = [first, nn.Sequential(Checkpointed(inner, reentrant=reentrant), nn.Dropout(0.2)), third]
    assert_as_undivided(models, rows(), options=options)


class Force(nn.Module):
    """Returns a number and its gradient by the input, as models of molecules do."""

    def __init__(self) -> None:
        super().__init__()
        self.energy = nn.Sequential(nn.Linear(7, 5), nn.Dropout(0.3), nn.Tanh(), nn.Linear(5, 1)).double()

    def forward(self, x: Tensor) -> Tensor:
        x.requires_grad_()
        energy = self.energy(x)
        (force,) = torch.autograd.grad(energy.sum(), x, create_graph=True)
        return torch.cat([energy, force[:, 1:]], 1)


@pytest.mark.parametrize("pipeline", ["1f1b", "zero-bubble"])
def test_a_stage_that_computes_gradients_itself(pipeline: str) -> None:
    first, second, third = stages()
    chain = assert_as_undivided([first, Force(), second, third], rows(), options={"pipeline": pipeline})
    assert chain.predict(rows()[0]).shape == (40, 3)


@pytest.mark.parametrize("devices", [TWO, HYBRID])
def test_an_embedding_with_sparse_gradients(devices: object) -> None:
    torch.manual_seed(0)
    models = [nn.Embedding(11, 6, sparse=True, dtype=torch.float64), nn.Tanh(), Last()]
    recipe = {"optimizer": "sgd", "lr": 0.1}
    assert_as_undivided(models, sentences(), devices=devices, recipe=recipe, options={"micro_batches": 3})


class Last(nn.Module):
    """Takes the mean over the tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 3, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.mean(1))


class Together(nn.Module):
    """Draws in a way that can't be divided by rows: numbers for more rows than there are, or with no rule."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "poisson":
            return x + torch.poisson(torch.ones(len(x), 1, dtype=x.dtype))
        return x + torch.randn(1 + len(x), dtype=x.dtype)[0]


@pytest.mark.parametrize("how", ["poisson", "one more"])
def test_draws_that_can_not_be_divided_do_not_shift_those_of_later_stages(how: str) -> None:
    first, second, third = stages(dropout=0.4)
    assert_as_undivided([first, Together(how), second, third], rows(), options={"micro_batches": 1})


class SequenceFirst(nn.Module):
    """Turns (row, token, feature) into (token, row, feature)."""

    def forward(self, x: Tensor) -> Tensor:
        return x.transpose(0, 1)


class RowsFirst(nn.Module):
    """Turns (token, row, feature) back, and takes the mean over the tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 3, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.mean(0))


@ways
def test_dropout_where_rows_are_the_second_axis(options: dict) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, 0.3, dtype=torch.float64)
    embedding = nn.Sequential(nn.Embedding(11, 8, dtype=torch.float64), SequenceFirst())
    assert_as_undivided([embedding, layer, RowsFirst()], sentences(), options=options)


@ways
def test_parts_in_evaluation_mode_are_trained_so_and_whole_models_are_not(options: dict) -> None:
    models = stages(dropout=0.5)
    models[0].get_submodule("2").eval()
    chain = assert_as_undivided(models, rows(), options=options)
    assert not chain["0"].get_submodule("2").training
    models = [stage.eval() for stage in stages(dropout=0.5)]
    whole = nn.Sequential(*copy.deepcopy(models)).eval()
    chain = assert_as_undivided(models, rows(), whole=whole, options=options)
    assert not any(module.training for name in chain.names for module in chain[name].modules())


@pytest.mark.slow
def test_stages_in_processes() -> None:
    models = transformer(0.2)
    options = {"strategy": "processes", "pipeline": "zero-bubble"}
    assert_as_undivided(models, sentences(21), whole=Row(copy.deepcopy(models)), devices=TWO, options=options)


def test_a_loss_that_writes_into_the_output() -> None:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        return output.sub_(target).square_().mean()

    x, _ = rows()
    assert_as_undivided(stages(), (x, x[:, :3].clone()), recipe={"loss": loss})


def test_a_huggingface_model_cut_by_hand() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=11,
        hidden_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=16,
        num_labels=3,
    )
    torch.manual_seed(0)
    model = transformers.BertForSequenceClassification(config).double()
    models: list[nn.Module] = [
        Embeddings(model.bert.embeddings),
        *(Block(block) for block in model.bert.encoder.layer),
        Head(model),
    ]
    tokens, labels = sentences()
    whole = Row(copy.deepcopy(models))
    chain = chain_of(models, THREE)
    before, after = undivided(whole, (tokens, labels)), fit(chain, (tokens, labels), micro_batches=3)
    assert_same_weights(weights(chain), weights(whole))
    assert after["chain"]["loss"] == pytest.approx(before["0"]["loss"], rel=1e-10)


class Embeddings(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        mask = torch.where(tokens == 0, -1e30, 0.0).double()
        return self.inner(tokens), mask[:, None, None, :]


class Block(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, hidden: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        found = self.inner(hidden, mask)
        return found[0] if isinstance(found, tuple) else found, mask


class Head(nn.Module):
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.inner = nn.Sequential(model.bert.pooler, model.dropout, model.classifier)

    def forward(self, hidden: Tensor, mask: Tensor) -> Tensor:
        return self.inner(hidden)
