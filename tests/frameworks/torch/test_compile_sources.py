"""What a compile process is given: constants with their devices, and the settings of the training process."""

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch._dynamo.utils import counters
from torch._inductor import config, cpp_builder
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from modelfleet.frameworks.torch.compiling import compiler, settings
from modelfleet.frameworks.torch.compiling.compile_queue import Outcome
from modelfleet.frameworks.torch.compiling.compiler import Compiler, compile_first
from modelfleet.frameworks.torch.compiling.graph_source import ANY_WIDTH, ONE_WIDTH, GraphSource
from modelfleet.frameworks.torch.compiling.one_library import one_library
from modelfleet.frameworks.torch.random.operations import DrawFromStreams
from modelfleet.frameworks.torch.random.streams import Streams
from modelfleet.frameworks.torch.tracing.trace import TensorSpec, trace


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    return tmp_path


def traced(step: Callable[..., Any], *inputs: Tensor) -> fx.GraphModule:
    return make_fx(step, tracing_mode="fake", _allow_non_fake_inputs=True)(*inputs)


def product(name: str = "one-width") -> GraphSource:
    """A program that needs no C++ compiler: torch's own product."""
    x, y = torch.zeros(3, 4), torch.zeros(4, 5)
    specs = [TensorSpec.of(tensor, False) for tensor in (x, y)]
    return GraphSource.of(traced(lambda x, y: [torch.mm(x, y)], x, y), specs, ONE_WIDTH)


def hits() -> int:
    return counters["inductor"]["fxgraph_cache_hit"]


def test_constants_on_an_accelerator_are_inputs(tmp_path: Path) -> None:
    constant, here = torch.zeros(3, device="meta"), torch.ones(3)
    graph = fx.Graph()
    x = graph.placeholder("x")
    there = graph.call_function(torch.ops.aten.add.Tensor, (x, graph.get_attr("_tensor_constant0")))
    both = graph.call_function(torch.ops.aten.add.Tensor, (there, graph.get_attr("_tensor_constant1")))
    again = graph.call_function(torch.ops.aten.mul.Tensor, (both, graph.get_attr("_tensor_constant0")))
    graph.output([again])
    module = fx.GraphModule({"_tensor_constant0": constant, "_tensor_constant1": here}, graph)

    made = GraphSource.of(module, [TensorSpec.of(here, False)], ONE_WIDTH)
    assert [spec.device.type for spec in made.inputs] == ["cpu", "meta"]
    assert not made.on_cpu
    assert list(made.constants) == ["_tensor_constant1"]
    assert made.lifted == (constant,)
    made.write(tmp_path / "one-width")
    read = GraphSource.read(tmp_path / "one-width")
    assert read.inputs == made.inputs
    assert not read.lifted
    (found,) = read.function()(torch.full((3,), 2.0), torch.full((3,), 10.0))
    assert found.tolist() == [130.0] * 3
    assert [node.op for node in module.graph.nodes].count("get_attr") == 3  # the program itself stays as it is


def test_a_lifted_constant_is_given_to_the_compiled_program(monkeypatch: pytest.MonkeyPatch) -> None:
    source = product()
    lifted = torch.ones(4, 5)
    found = compile_first([GraphSource(ONE_WIDTH, source.text, {}, source.inputs, (lifted,))])[0]
    assert torch.equal(found(torch.ones(3, 4))[0], torch.full((3, 5), 4.0))


def test_a_program_of_one_width_is_found_in_the_cache() -> None:
    compile_first([product()])
    before = hits()
    compile_first([product()])
    assert hits() == before + 1


@pytest.fixture
def restored() -> Iterator[None]:
    """Settings as they are now, afterwards."""
    before = settings.present(), torch.get_float32_matmul_precision()
    yield
    settings.apply(before[0])
    torch.set_float32_matmul_precision(before[1])


def test_a_process_that_is_given_the_settings_of_another_finds_what_that_has_compiled(
    restored: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.set_float32_matmul_precision("highest")
    usual = settings.present()
    torch.set_float32_matmul_precision("high")
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.set_default_dtype(torch.float64)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    with config.patch({"epilogue_fusion": False}):
        given = json.loads(json.dumps(settings.present()))
        compile_first([product()])
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)  # a program serves any number of threads
    settings.apply(usual)
    assert settings.present() == usual != given
    before = hits()
    compile_first([product()])
    assert hits() == before
    with config.patch({"epilogue_fusion": True}):
        settings.apply(given)
        compile_first([product()])
    assert hits() == before + 1


class Ended:
    """A compile process that has ended well, under some settings."""

    def __init__(self, under: Any) -> None:
        self.settings, self.outcome, self.forms = under, Outcome(ONE_WIDTH), [product()]


def test_what_was_compiled_under_other_settings_is_not_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    one = Compiler(trace(lambda x, y: [torch.mm(x, y)], (torch.zeros(3, 4), torch.zeros(4, 5)), [False, False]))
    loaded: list[Any] = []
    monkeypatch.setattr(Compiler, "_load", lambda self, forms: loaded.append(forms))
    for under in ({}, settings.present()):
        one._process, one._begun = Ended(under), (0.0, 1.0)  # pyrefly: ignore
        one._finish(one._process, 1.0)  # pyrefly: ignore
        assert one._process is None
        assert not one._done
        assert bool(loaded) == bool(under)


def test_what_was_compiled_before_is_found_under_the_same_settings_only(restored: None) -> None:
    one = Compiler(trace(lambda x: [x + 1], (torch.zeros(3),), [False]))
    torch.set_float32_matmul_precision("highest")
    first = one._marker
    torch.set_float32_matmul_precision("medium")
    assert one._marker != first
    torch.set_float32_matmul_precision("highest")
    assert one._marker == first


def test_a_compile_process_is_told_the_index_of_a_device(tmp_path: Path) -> None:
    # torch's code has the index built in.
    spec = TensorSpec((3,), (1,), torch.float32, torch.device("cuda:1"), False)
    text = product().text
    GraphSource(ONE_WIDTH, text, {}, (spec,)).write(tmp_path / "one-width")
    assert GraphSource.read(tmp_path / "one-width").inputs == (spec,)


@pytest.mark.skipif(sys.platform == "win32", reason="the flag is that of GCC and Clang")
def test_words_may_wrap_in_what_a_cpp_compiler_is_given() -> None:
    def flags() -> list[str]:
        return cpp_builder._get_optimization_cflags("g++")[0]

    with one_library(wraps=True):
        assert "fwrapv" in flags()
    with one_library():
        assert "fwrapv" not in flags()
    assert "fwrapv" not in flags()


@pytest.mark.parametrize("rate", [0.0, 0.5])
def test_a_program_that_draws_is_known_by_its_text(rate: float) -> None:
    def step(x: Tensor, seed: Tensor) -> list[Tensor]:
        with DrawFromStreams(Streams(seed, seed)):
            return [F.dropout(x, rate) if rate else x + 1]

    inputs = torch.zeros(3, 4), torch.zeros(3, dtype=torch.int64)
    specs = [TensorSpec.of(tensor, False) for tensor in inputs]
    assert GraphSource.of(traced(step, *inputs), specs, ONE_WIDTH).draws == bool(rate)


def test_a_width_that_is_built_in_leads_to_a_program_for_that_width(monkeypatch: pytest.MonkeyPatch) -> None:
    # The compile process does not run programs of an accelerator, so this may show only when they are loaded.
    monkeypatch.setenv("MODELFLEET_COMPILE", "auto")
    program = trace(lambda x: [x + 1], (torch.zeros(4, 3),), [True])
    one = Compiler(program, lambda width: trace(lambda x: [x + 1], (torch.zeros(width, 3),), [True]))
    assert [source.form for source in one._forms()] == [ANY_WIDTH, ONE_WIDTH]

    def built_in(forms: Any) -> Any:
        raise compiler.FixedWidthError("a width is built in")

    monkeypatch.setattr(compiler, "compile_first", built_in)
    one._load(one._forms()[:1])
    assert not one._done
    assert one.failure is None
    assert [source.form for source in one._forms()] == [ONE_WIDTH]
