"""Hypothesis draws programs."""

from collections.abc import Callable
from importlib import import_module
from typing import Any

from hypothesis import strategies as st
from tests.fuzz.programs import (
    Add,
    Clone,
    Compile,
    Data,
    Drop,
    Edit,
    Evaluate,
    Fit,
    Freeze,
    Plan,
    Predict,
    Program,
    Reload,
    Stop,
    Train,
    Turn,
    Verb,
)

member = st.integers(0, 2)
look = st.sampled_from([False, False, True])
SIZES = (3, 4, 5, 8, (4, 3), (2, 5))


@st.composite
def datas(draw: Callable[..., Any], *, training: bool, shuffled: bool = True) -> Data:
    """Any data set: small, of one or of each member."""
    forms = ["arrays"] * 4 + ["list", "function"]
    forms += ["shuffled"] if training and shuffled else []
    form = draw(st.sampled_from(forms))
    own = draw(st.sampled_from([None, None, (6, 9), (8, 8), (5, 12, 7)]))
    uneven = form in ("list", "function") and draw(st.booleans())
    return Data(draw(st.sampled_from([6, 8, 9, 12])), draw(st.integers(0, 2)), form, own, uneven)


@st.composite
def fits(draw: Callable[..., Any], target: Any, *, heavy: bool, stateful: bool) -> Fit:
    """Any fit."""
    data = draw(datas(training=True, shuffled=target.SHUFFLED))
    epochs = draw(st.sampled_from([1, 2, 2, 3, (1, 3), (2, 1)]))
    batch = draw(st.sampled_from(SIZES)) if data.form == "arrays" or data.own else draw(st.sampled_from([3, 4, 5]))
    strategies = ["auto"] * 5 + ["interleaved", "fused", "threads"] + (["processes"] if heavy else [])
    validation = draw(st.none() | datas(training=False))
    during: tuple[Any, ...] = ()
    if draw(st.integers(0, 3)) == 0:
        inner = st.one_of(
            st.builds(Evaluate, data=datas(training=False)),
            st.builds(Predict, data=datas(training=False)),
            st.builds(Edit, member=member, how=st.just("scale")),
            st.builds(Stop, member=member),
            st.builds(Turn),
            st.just(Plan()),
        )
        during = tuple(draw(st.lists(st.tuples(st.integers(1, 2), inner), min_size=1, max_size=2)))
        ends = st.builds(Evaluate, data=datas(training=False)) | st.builds(Predict, data=datas(training=False))
        during += tuple((0, verb) for verb in draw(st.lists(ends, max_size=1)))
    resumable = not stateful and not during and data.form == "arrays"
    broken = draw(st.sampled_from([None, None, 2])) if resumable and epochs in (2, 3) else None
    steps = draw(st.sampled_from([None] * 5 + [1])) if data.form != "arrays" else None
    strategy = draw(st.sampled_from(strategies))
    shuffle = target.SHUFFLED and draw(st.booleans())
    return Fit(draw(look), data, epochs, batch, shuffle, strategy, validation, during, broken, steps)


def programs(name: str, *, heavy: bool = False) -> st.SearchStrategy[Program]:
    """Any program for a target. `heavy`: worker processes, too."""
    return _programs(name, import_module(f"tests.fuzz.fleet_{name.partition('-')[0]}"), heavy)


@st.composite
def _programs(draw: Callable[..., Any], name: str, target: Any, heavy: bool) -> Program:
    kind = draw(st.sampled_from(target.KINDS))
    task = draw(st.sampled_from(["numbers", "classes"]))
    dtype = draw(st.sampled_from(target.DTYPES))
    nets = draw(target.nets(kind, draw(st.integers(1, 3)), dtype))
    stateful = any(map(target.stateful, nets))
    recipes = target.recipes(task, dtype)
    fit = fits(target, heavy=heavy, stateful=stateful)
    size = st.sampled_from(SIZES)
    verbs = st.one_of(
        fit,
        fit,
        st.builds(Evaluate, data=datas(training=False), batch=size, look=look),
        st.builds(Predict, data=datas(training=False), batch=size, look=look),
        st.builds(Compile, recipe=recipes, members=st.sampled_from([None, (0,), (1, 2)])),
        st.builds(Plan, data=st.none() | datas(training=False)),
        st.builds(Add, net=target.nets(kind, 1, dtype).map(lambda nets: nets[0]), recipe=recipes),
        st.builds(Drop, member=member),
        st.builds(Clone, member=member),
        st.builds(Freeze, member=member, part=member, on=st.booleans()),
        st.builds(Edit, member=member, how=st.sampled_from(["scale", "copy", "attribute"])),
        st.builds(Train, member=member, data=datas(training=True, shuffled=False)),
        st.builds(Turn),
    )
    drawn: list[Verb] = [Compile(recipe=draw(recipes)), draw(fit)]
    drawn += draw(st.lists(verbs, max_size=4))
    shared = any(getattr(net, "shared", False) for net in nets)
    if not stateful and not shared and not any(isinstance(verb, Add | Freeze) for verb in drawn):
        drawn += draw(st.lists(st.builds(Reload, recipe=recipes), max_size=1))
        drawn += [draw(fit)] if isinstance(drawn[-1], Reload) else []
    devices = draw(st.sampled_from(["cpu", "cpu", "cpu", "cpu:0,cpu:1"]))
    return Program(name, nets, tuple(drawn), task, dtype, devices, draw(st.booleans()))
