import functools
import math
import threading
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import weight_norm
from transformers import BertConfig, BertForSequenceClassification

from modelfleet.frameworks.torch.structure import difference, shared_parameters, signature


class Net(nn.Module):
    """A network with whatever plain attributes a test gives it."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.BatchNorm2d(2))
        self.head = nn.Linear(8, 4)
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x).flatten(1))


class Colour(Enum):
    RED = 1
    BLUE = 2


@dataclass
class Options:
    width: int = 3
    act: Callable[[Tensor], Tensor] = F.relu


def told(a: nn.Module, b: nn.Module) -> str | None:
    return difference(signature(a), signature(b))


def test_equal_models_are_equal() -> None:
    a, b = Net(), Net()
    assert signature(a) == signature(b)
    assert hash(signature(a)) == hash(signature(b))
    assert told(a, b) is None


def test_weights_buffers_and_gradients_do_not_count() -> None:
    a, b = Net(), Net()
    a(torch.randn(3, 1, 4, 4)).sum().backward()
    with torch.no_grad():
        a.head.weight.add_(1)
    assert told(a, b) is None


def test_many_models_make_one_group() -> None:
    groups: dict[Any, int] = {}
    for _ in range(2000):
        model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        key = signature(model)
        groups[key] = groups.get(key, 0) + 1
    assert list(groups.values()) == [2000]


def edit(change: Callable[[Net], object]) -> Net:
    net = Net()
    change(net)
    return net


def _set(module: str, name: str, value: object) -> Callable[[Net], object]:
    return lambda net: setattr(net.get_submodule(module), name, value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_set("features.0", "stride", (2, 2)), "features.0.stride is (2, 2), not (1, 1)"),
        (_set("features.2", "eps", 0.1), "features.2.eps is 0.1, not 1e-05"),
        (_set("features", "1", nn.GELU()), "class of features.1 is GELU, not ReLU"),
        (_set("features", "3", nn.ReLU()), "has a module features.3, the other has none"),
        (lambda net: net.features.pop(2), "has no module features.2"),
        (_set("", "head", nn.Linear(9, 4)), "parameter head.weight is (4, 9), not (4, 8)"),
        (_set("", "head", nn.Linear(8, 4, bias=False)), "has no parameter head.bias"),
        (lambda net: net.head.double(), "parameter head.weight is float64, not float32"),
        (lambda net: net.head.weight.requires_grad_(False), "parameter head.weight is frozen, not trained"),
        (lambda net: net.eval(), "in eval mode, not training"),
        (lambda net: net.features[2].eval(), "features.2 is in eval mode, not training"),
        (_set("head", "scale", 2), "has an attribute head.scale, the other has none"),
        (lambda net: net.register_buffer("mask", torch.ones(2)), "has a buffer mask, the other has none"),
    ],
)
def test_a_difference_in_words(change: Callable[[Net], object], words: str) -> None:
    assert told(edit(change), Net()) == words


def test_persistence_of_a_buffer_counts() -> None:
    a, b = Net(), Net()
    a.register_buffer("mask", torch.ones(2), persistent=False)
    b.register_buffer("mask", torch.zeros(2))
    assert told(a, b) == "buffer mask is temporary, not persistent"


def test_the_order_of_modules_counts() -> None:
    a = nn.ModuleDict({"x": nn.ReLU(), "y": nn.ReLU()})
    b = nn.ModuleDict({"y": nn.ReLU(), "x": nn.ReLU()})
    assert told(a, b) == "has x where the other has y"


def test_a_module_is_not_an_attribute() -> None:
    assert told(Net(extra=None), Net(extra=nn.ReLU())) == "extra is an attribute, not a module"
    buffered = edit(lambda net: net.register_buffer("extra", torch.ones(1)))
    assert told(buffered, Net(extra=torch.ones(1))) == "extra is a buffer, not an attribute"


def test_tied_weights_count() -> None:
    def pair(tied: bool) -> nn.Module:
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        if tied:
            model[1].weight = model[0].weight
        return model

    assert told(pair(True), pair(True)) is None
    assert told(pair(True), pair(False)) == "tied weights: 1.weight is 0.weight, not its own"
    assert told(pair(False), pair(True)) == "tied weights: 1.weight is its own, not 0.weight"


def test_a_module_used_twice_counts() -> None:
    layer = nn.Linear(3, 3)
    twice, apart = nn.Sequential(layer, layer), nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    assert told(twice, apart) == "tied modules: 1 is 0, not its own"


def double(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(2 * arg for arg in args)


def half(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(arg / 2 for arg in args)


def hooked(hook: Callable[..., Any]) -> Net:
    net = Net()
    vars(net)["handle"] = net.head.register_forward_pre_hook(hook)
    return net


def test_hooks_count_and_their_numbers_do_not() -> None:
    assert told(hooked(double), hooked(double)) is None
    words = "hooks of head differ: forward pre hook half, not forward pre hook double"
    assert told(hooked(half), hooked(double)) == words
    bare = Net(handle=hooked(half).handle)
    assert told(hooked(half), bare) == "number of hooks of head is 1, not 0"


def test_functions_count_by_code_closure_and_defaults() -> None:
    def scaled(factor: float, power: int = 1) -> Net:
        return Net(act=lambda x, power=power: factor * x**power)

    assert told(scaled(2.0), scaled(2.0)) is None
    assert told(scaled(2.0), scaled(3.0)) == "act's factor is 2.0, not 3.0"
    assert told(scaled(2.0, 1), scaled(2.0, 2)) == "act's default values is ((1,), None), not ((2,), None)"
    a, b = Net(act=lambda x: x + 1), Net(act=lambda x: x + 2)
    assert "<lambda> at test_structure.py" in (told(a, b) or "")
    assert told(Net(act=F.relu), Net(act=F.gelu)) == "act is relu, not gelu"
    assert told(Net(act=torch.tanh), Net(act=torch.tanh)) is None


def test_a_replaced_forward_counts() -> None:
    a, b = Net(), Net()
    b.forward = lambda x: x
    assert told(b, a) == "has an attribute forward, the other has none"


def test_a_class_whose_forward_was_replaced_in_between_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    before = signature(Net())
    monkeypatch.setattr(Net, "forward", lambda self, x: x)
    words = difference(signature(Net()), before)
    assert words == "forward of the model is not the same function: Net was changed in between"


def make_local(power: int) -> nn.Module:
    class Local(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x) ** power

    return Local()


def test_classes_made_in_a_function_count_by_content() -> None:
    assert told(make_local(2), make_local(2)) is None
    assert told(make_local(2), make_local(3)) == "class of the model.forward's power is 2, not 3"


def test_parametrized_layers_are_equal() -> None:
    assert told(weight_norm(nn.Linear(2, 3)), weight_norm(nn.Linear(2, 3))) is None


@pytest.mark.parametrize("make", [lambda: nn.LSTM(2, 3, 2), lambda: nn.MultiheadAttention(4, 2)])
def test_layers_that_hold_on_to_their_weights_are_equal(make: Callable[[], nn.Module]) -> None:
    assert told(make(), make()) is None


@pytest.mark.parametrize(
    ("value", "other", "words"),
    [
        (1, True, "x is 1, not True"),
        (1, 1.0, "x is 1, not 1.0"),
        (0.0, -0.0, "x is 0.0, not -0.0"),
        ("a", "b", "x is 'a', not 'b'"),
        (None, 0, "x is None, not 0"),
        ([1, 2], [1, 3], "x is [1, 2], not [1, 3]"),
        ([1], (1,), "x is [1], not (1,)"),
        (list(range(50)), list(range(49)), "x[49] is 49, the other has none"),
        ({"a": 1}, {"a": 2}, "x is {'a': 1}, not {'a': 2}"),
        ({f"key{i}": i for i in range(20)}, {f"key{i}": i for i in range(21)}, "has no x['key20']"),
        ({1, 2}, {1, 3}, "x is {1, 2}, not {1, 3}"),
        (Colour.RED, Colour.BLUE, "x is RED, not BLUE"),
        (torch.float16, torch.float32, "x is torch.float16, not torch.float32"),
        (torch.Size([2]), torch.Size([3]), "x is (2,), not (3,)"),
        (torch.device("cpu"), torch.device("meta"), "x is device(type='cpu'), not device(type='meta')"),
        (Options(), Options(width=4), "x.width is 3, not 4"),
        (Options(), Options(act=F.gelu), "x.act is relu, not gelu"),
        (functools.partial(F.gelu), functools.partial(F.relu), "x is gelu, not relu"),
        (
            functools.partial(F.gelu, approximate="tanh"),
            functools.partial(F.gelu, approximate="none"),
            "x's keywords is {'approximate': 'tanh'}, not {'approximate': 'none'}",
        ),
        (torch.ones(2), torch.zeros(2), "x is another float32 tensor (2,)"),
        (torch.ones(2), torch.ones(3), "x is float32 tensor (2,), not float32 tensor (3,)"),
        (np.ones(2), np.zeros(2), "x is another float64 array (2,)"),
        (np.float32(1), np.float32(2), "x is np.float32(1.0), not np.float32(2.0)"),
        (slice(1), slice(2), "x is (None, 1, None), not (None, 2, None)"),
        (nn.ReLU, nn.GELU, "x is ReLU, not GELU"),
        (np.array([None]), np.array([1], dtype=object), "x is [None], not [1]"),
    ],
)
def test_attributes_count_by_value(value: object, other: object, words: str) -> None:
    assert told(Net(x=[value]), Net(x=[other])) is not None  # in a list, a module's setattr can't interfere
    assert told(Net(x=value), Net(x=other)) == words


@pytest.mark.parametrize(
    "make",
    [
        lambda: math.nan,
        lambda: np.float64("nan"),
        lambda: torch.tensor([math.nan, 1]),
        lambda: np.array([math.nan, 1]),
        lambda: {"a": [1, (2, {3})]},
        lambda: Options(),
        lambda: torch.tensor([1], dtype=torch.bfloat16),
        lambda: np.array([None, "a"], dtype=object),
        lambda: functools.partial(F.gelu, approximate="tanh"),
        lambda: range(3),
    ],
)
def test_equal_attributes_are_equal(make: Callable[[], Any]) -> None:
    assert told(Net(x=make()), Net(x=make())) is None


def test_attributes_may_form_a_cycle() -> None:
    def cyclic(end: int) -> Net:
        loop: list[Any] = [end]
        loop.append(loop)
        return Net(x=loop)

    assert told(cyclic(1), cyclic(1)) is None
    assert told(cyclic(1), cyclic(2)) is not None


def test_an_attribute_nested_too_deep_is_not_compared() -> None:
    def deep() -> Net:
        value: list[Any] = []
        for _ in range(100_000):
            value = [value]
        return Net(x=value)

    assert "of type list can't be compared" in (told(deep(), deep()) or "")


def test_an_attribute_may_refer_to_a_module_or_parameter() -> None:
    def referring(name: str) -> Net:
        net = Net()
        vars(net)["refers"] = [net.head, getattr(net.head, name)]
        return net

    assert told(referring("weight"), referring("weight")) is None
    words = "refers is [module head, head.weight], not [module head, head.bias]"
    assert told(referring("weight"), referring("bias")) == words


def test_a_module_in_a_plain_list_counts_with_its_weights() -> None:
    hidden = nn.Linear(2, 2)
    assert told(Net(x=[hidden]), Net(x=[hidden])) is None
    assert told(Net(x=[hidden]), Net(x=[nn.Linear(2, 2)])) is not None


def test_what_cannot_be_compared_makes_a_member_unlike_any_other() -> None:
    assert told(Net(x=threading.Lock()), Net(x=threading.Lock())) == "attribute x of type lock can't be compared"
    assert told(Net(x=[torch.Generator()]), Net(x=[torch.Generator()])) == (
        "attribute x[0] of type Generator can't be compared"
    )
    lock = threading.Lock()
    assert told(Net(x=lock), Net(x=lock)) is None


def bert(**options: Any) -> nn.Module:
    return BertForSequenceClassification(
        BertConfig(
            vocab_size=20,
            hidden_size=8,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=8,
            max_position_embeddings=8,
            **options,
        )
    )


def test_hugging_face_models_count_by_their_config() -> None:
    assert told(bert(), bert()) is None
    assert told(bert(_name_or_path="somewhere"), bert()) is None
    assert told(bert(hidden_act="relu"), bert()) == "config.hidden_act is 'relu', not 'gelu'"


def test_shared_parameters_are_the_same_tensors_in_all_models() -> None:
    trunk = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    models = [nn.Sequential(trunk, nn.Linear(2, 1)) for _ in range(3)]
    expected = {f"0.{name}" for name in trunk.state_dict()}
    assert shared_parameters(models) == expected
    view = nn.Linear(2, 2)
    view.weight = nn.Parameter(trunk.get_parameter("0.weight").detach())  # another tensor on the same storage
    models[2][0] = nn.Sequential(view, nn.BatchNorm1d(2))
    assert shared_parameters(models) == {"0.0.weight"}


def test_models_without_common_tensors_share_nothing() -> None:
    assert shared_parameters([Net(), Net()]) == set()
    assert shared_parameters([Net()]) == set()
    empty = [nn.ParameterList([torch.empty(0)]) for _ in range(2)]  # all at the address 0
    assert shared_parameters(empty) == set()
