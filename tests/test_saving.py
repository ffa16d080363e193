"""Fleets on disk: what is saved comes back, and what can't be used is refused."""

import errno
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests import manifests
from tests.helpers import all_weights, equal, fit, fleet_of, mlp, toy, weights
from tests.manifests import put
from torch import Tensor, nn

import modelfleet as mf
from modelfleet.frameworks.torch import files
from modelfleet.store.checksums import checksum_of

X, Y = toy(20)


class Tied(nn.Module):
    """An embedding that is also the head, and a buffer of its own."""

    def __init__(self, words: int = 7) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, words, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.full((), 2.0))
        self.register_buffer("cache", torch.rand(3), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.embedding(x))) * self.scale


def test_a_fleet_comes_back_with_a_factory(tmp_path: Path) -> None:
    fleet = fleet_of(["a", "b"], seed=4, dropout=0.5)
    fit(fleet, (X, Y))
    fleet.save(tmp_path / "fleet")
    made: list[nn.Module] = []

    def factory(dropout: float) -> nn.Module:
        made.append(mlp(dropout=dropout))
        return made[-1]

    before = torch.get_rng_state()
    loaded = mf.load(tmp_path / "fleet", factory)
    assert torch.equal(before, torch.get_rng_state())
    assert loaded.names == ["a", "b"]
    assert loaded["a"] is made[0]
    assert equal(all_weights(loaded), all_weights(fleet))
    # The seed came along: the members go on with the shuffles and the dropout that are theirs.
    unsaved = mf.Fleet({name: fleet[name] for name in fleet.names}, seed=4)
    for each in (unsaved, loaded):
        each.compile("sgd", "cross_entropy", lr=0.1)
        fit(each, (X, Y), batch_size=8)
    assert equal(all_weights(loaded), all_weights(unsaved))


def test_the_factory_is_imported_only_when_that_is_allowed(tmp_path: Path) -> None:
    fleet = mf.Fleet.build(mlp, ["a", "b"], width=mf.each([5, np.int64(7)]))
    fleet.save(tmp_path)
    with pytest.raises(mf.StoreError, match=r"asks to import and call 'tests.helpers:mlp'.*allow_import=True"):
        mf.load(tmp_path)
    loaded = mf.load(tmp_path, allow_import=True)
    assert [loaded[name][0].out_features for name in loaded.names] == [5, 7]
    assert equal(all_weights(loaded), all_weights(fleet))
    # What was loaded can be saved and loaded again, keywords and all.
    loaded.clone("b", as_="c")
    loaded.save(tmp_path)
    again = mf.load(tmp_path, allow_import=True)
    assert again.names == ["a", "b", "c"]
    assert equal(weights(again["c"]), weights(fleet["b"]))


def test_only_some_members_can_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = mf.Fleet.build(mlp, 20)
    fleet.save(tmp_path)
    rows: list[tuple[int, int]] = []
    read_rows = files.read_rows

    def watched(path: Path, start: int, stop: int) -> list[dict[str, Tensor]]:
        rows.append((start, stop))
        return read_rows(path, start, stop)

    monkeypatch.setattr(files, "read_rows", watched)
    loaded = mf.load(tmp_path, mlp, members=["17", "3", "4"])
    assert loaded.names == ["17", "3", "4"]
    assert rows == [(17, 18), (3, 5)]
    for name in loaded.names:
        assert equal(weights(loaded[name]), weights(fleet[name])), name
    rows.clear()
    assert equal(all_weights(mf.load(tmp_path, mlp)), all_weights(fleet))
    assert rows == [(0, 20)]
    with pytest.raises(mf.InputError, match=r"unknown member '71'. Did you mean '7'"):
        mf.load(tmp_path, mlp, members=["71"])


def test_tied_weights_and_buffers_come_back(tmp_path: Path) -> None:
    fleet = mf.Fleet.build(Tied, 2)
    words = np.arange(12) % 7
    fleet.compile("sgd", "cross_entropy", lr=0.1)
    fit(fleet, (words, words))
    with torch.no_grad():
        fleet["1"].scale.fill_(3)
    fleet.save(tmp_path)
    loaded = mf.load(tmp_path, Tied)
    assert equal(all_weights(loaded), all_weights(fleet))
    assert loaded["1"].head.weight is loaded["1"].embedding.weight
    assert loaded["1"].scale == 3
    assert loaded["0"].norm.num_batches_tracked == 1
    assert loaded["0"].norm.running_mean.abs().sum() > 0


class Counting(nn.Module):
    """Keeps more than tensors."""

    def __init__(self, count: Any = 0) -> None:
        super().__init__()
        self.inner = Keeping(count)
        self.out = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(x)


class Keeping(nn.Module):
    def __init__(self, kept: Any) -> None:
        super().__init__()
        self.kept = kept

    def get_extra_state(self) -> Any:
        return self.kept

    def set_extra_state(self, state: Any) -> None:
        self.kept = state


def test_extra_state_comes_back(tmp_path: Path) -> None:
    states: list[Any] = [
        3,
        None,
        {"names": ["a", ("b", 1.5)], 4: float("inf"), "t": torch.arange(3, dtype=torch.int16), "more": {}},
        "long " * 200,
        [np.arange(4.0).reshape(2, 2), True],
    ]
    fleet = mf.Fleet([Counting(state) for state in states])
    fleet.save(tmp_path)
    loaded = mf.load(tmp_path, Counting)
    assert all(equal(weights(loaded[name].out), weights(fleet[name].out)) for name in fleet.names)
    kept = [loaded[name].inner.kept for name in loaded.names]
    assert kept[:2] == states[:2]
    assert torch.equal(kept[2].pop("t"), states[2].pop("t"))
    assert kept[2] == states[2]
    assert kept[3] == states[3]
    assert np.array_equal(kept[4][0], states[4][0])
    assert kept[4][1] is True


def test_extra_state_that_only_pickle_could_hold_is_refused(tmp_path: Path) -> None:
    fleet = mf.Fleet({"a": Counting(), "b": Counting({"x": [object()]})})
    told = r"member 'b': the get_extra_state of 'inner' \(Keeping\) returns a object, .*without pickle. Return"
    with pytest.raises(mf.StoreError, match=told):
        fleet.save(tmp_path / "fleet")
    assert not (tmp_path / "fleet").exists()


def test_extra_state_that_the_factorys_model_has_not_is_told(tmp_path: Path) -> None:
    mf.Fleet({"a": nn.Sequential(Keeping(1))}).save(tmp_path)
    with pytest.raises(mf.StoreError, match=r"does not fit the model .* made: it has no '0._extra_state'"):
        mf.load(tmp_path, lambda: nn.Sequential(nn.Identity()))


def test_models_of_unlike_structure_share_a_folder(tmp_path: Path) -> None:
    fleet = mf.Fleet({"a": mlp(5), "b": mlp(9), "c": mlp(5)})
    fleet.save(tmp_path)
    assert len(list(tmp_path.glob("*.safetensors"))) == 2
    widths = iter([5, 9, 5])
    loaded = mf.load(tmp_path, lambda: mlp(next(widths)))
    assert equal(all_weights(loaded), all_weights(fleet))


def test_a_save_replaces_the_old_copy(tmp_path: Path) -> None:
    fleet = fleet_of(2)
    fleet.save(tmp_path)
    fit(fleet, (X, Y))
    fleet.save(tmp_path)
    assert equal(all_weights(mf.load(tmp_path, mlp)), all_weights(fleet))
    names = sorted(path.name.partition(".")[0] for path in tmp_path.iterdir())
    assert names == ["group-0", "manifest", "optimizer-0"]


# --- what does not fit


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        (lambda: mlp(9), r"its '0.weight' is \(9, 4\) float32, the folder's is \(6, 4\) float32"),
        (lambda: mlp().double(), "float64, the folder's is"),
        (lambda: nn.Linear(4, 3), "it has a 'weight' that the folder does not"),
        (lambda: nn.Sequential(mlp()[0], nn.Tanh()), "it has no '2.bias'"),
    ],
)
def test_a_wrong_factory_is_told_what_does_not_fit(
    factory: Callable[[], nn.Module], message: str, tmp_path: Path
) -> None:
    mf.Fleet([mlp()]).save(tmp_path)
    with pytest.raises(mf.StoreError, match=rf"member '0' of .* does not fit.*{message}.*Give the factory"):
        mf.load(tmp_path, factory)


def test_a_factory_that_makes_no_model_is_refused(tmp_path: Path) -> None:
    mf.Fleet([mlp()]).save(tmp_path)
    with pytest.raises(mf.InputError, match="returned a NoneType for member '0'"):
        mf.load(tmp_path, lambda: None)


def test_a_factory_that_takes_other_keywords_is_refused(tmp_path: Path) -> None:
    mf.Fleet.build(mlp, 1, width=5).save(tmp_path)
    with pytest.raises(mf.InputError, match=r"member '0': the factory can't be called with width=5"):
        mf.load(tmp_path, lambda: mlp())


def test_without_a_recorded_factory_one_must_be_given(tmp_path: Path) -> None:
    mf.Fleet.build(lambda: mlp(), 1).save(tmp_path)
    with pytest.raises(mf.StoreError, match=r"does not say how to build member '0'.*factory=make_net"):
        mf.load(tmp_path, allow_import=True)


def test_a_factory_that_is_gone_is_named(tmp_path: Path) -> None:
    mf.Fleet.build(mlp, 1).save(tmp_path)
    for path, why in (("tests.helpers:gone", "gone"), ("no_such_module:make", "no_such_module")):
        manifests.edit(tmp_path, put("members", 0, "factory", value=path))
        with pytest.raises(mf.StoreError, match=rf"factory '{path}' .*can't be imported: .*{why}.*Give load"):
            mf.load(tmp_path, allow_import=True)


def test_keywords_that_json_cannot_hold_are_told_when_loading(tmp_path: Path) -> None:
    fleet = mf.Fleet.build(lambda layer: nn.Sequential(layer(4, 3)), 1, layer=nn.Linear)
    fleet.save(tmp_path)
    with pytest.raises(mf.StoreError, match=r"member '0' .* arguments that JSON can't hold"):
        mf.load(tmp_path, lambda layer: nn.Sequential(layer(4, 3)))

    model = nn.Sequential(nn.Linear(4, 3))
    loaded = mf.load(tmp_path, {"0": model})
    assert loaded["0"] is model
    assert equal(weights(model), weights(fleet["0"]))


# --- a factory for each member


@pytest.fixture
def unlike(tmp_path: Path) -> mf.Fleet:
    """A fleet of unlike models, saved in `tmp_path`."""
    fleet = mf.Fleet({"a": mlp(3), "b": mlp(5)})
    fleet.save(tmp_path)
    return fleet


@pytest.mark.parametrize(
    "factory",
    [
        {"a": lambda: mlp(3), "b": lambda: mlp(5)},
        {"b": mlp(5), "a": lambda: mlp(3)},
        mf.each([lambda: mlp(3), mlp(5)]),
        mf.each({"a": mlp(3), "b": mlp(5)}),
    ],
)
def test_unlike_models_come_back_with_a_factory_or_a_model_each(
    factory: Any, unlike: mf.Fleet, tmp_path: Path
) -> None:
    assert equal(all_weights(mf.load(tmp_path, factory)), all_weights(unlike))
    own = mf.each([mlp(5)]) if isinstance(factory, mf.Each) else factory
    some = mf.load(tmp_path, own, members=["b"])
    assert equal(weights(some["b"]), weights(unlike["b"]))


@pytest.mark.usefixtures("unlike")
@pytest.mark.parametrize(
    ("factory", "error", "told"),
    [
        (None, mf.StoreError, r"build member 'a' .*unlike, give a factory or a model for each: factory=\{'a'"),
        (lambda: mlp(3), mf.StoreError, r"member 'b' .*does not fit.*unlike, give each its own: \{'b': make, …\}"),
        ({"a": mlp}, mf.InputError, r"factory: each\(...\) has no value for 'b'"),
        ({"a": mlp, "b": mlp, "c": mlp}, mf.InputError, "names 'c', which the fleet does not have"),
        ({"a": mlp, "b": "mlp"}, mf.InputError, "the factory is 'mlp'; expected a function"),
        (mlp(3), mf.InputError, r"the factory is a model, a Sequential; .*one for each member: factory=\{name"),
        (3, mf.InputError, "the factory is 3; expected a function that returns a new model"),
    ],
)
def test_a_factory_that_does_not_do_is_told_what_does(
    factory: Any, error: type[Exception], told: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=told):
        mf.load(tmp_path, factory)


def test_a_fleet_is_not_built_by_a_model() -> None:
    with pytest.raises(mf.InputError, match="the factory is a model, a Sequential; expected a function"):
        mf.Fleet.build(mlp(), 2)


# --- damaged and foreign folders


def truncate(folder: Path) -> None:
    path = next(folder.glob("*.safetensors"))
    path.write_bytes(path.read_bytes()[:-10])


def flip(folder: Path) -> None:
    path = next(folder.glob("*.safetensors"))
    content = bytearray(path.read_bytes())
    content[3] = 0xFF  # the header's length
    path.write_bytes(bytes(content))


def lose(folder: Path) -> None:
    next(folder.glob("*.safetensors")).unlink()


def forget(folder: Path) -> None:
    (folder / "manifest.json").unlink()


def halve(folder: Path) -> None:
    path = folder / "manifest.json"
    path.write_text(path.read_text()[:100])


def twice(folder: Path) -> None:
    path = folder / "manifest.json"
    rest = path.read_bytes().partition(b", ")[2].replace(b'"seed": ', b'"seed": 1, "seed": ', 1)
    path.write_bytes(b'{"checksum": "%s", %s' % (checksum_of(rest).encode(), rest))


def without(key: str) -> Callable[[Path], None]:
    def change(manifest: dict[str, Any]) -> None:
        (manifest if key in manifest else manifest["members"][0]).pop(key)

    return lambda folder: manifests.edit(folder, change)


def edited(*path: Any, value: object) -> Callable[[Path], None]:
    return lambda folder: manifests.edit(folder, put(*path, value=value))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (truncate, r"bytes, expected .*Load another copy"),
        (flip, r"is corrupt: its header claims"),
        (lose, r"is missing. Load another copy"),
        (forget, r"was not saved by modelfleet"),
        (halve, r"manifest.json can't be used: it is not valid JSON"),
        (without("members"), r"manifest that is not a fleet's: the manifest has no 'members'"),
        (without("row"), r"manifest that is not a fleet's: the manifest\['members'\]\[0\] has no 'row'"),
        (edited("members", 0, "row", value=99), r"the data file of member '0' has no row 99"),
        (edited("members", 0, "row", value=-1), r"the data file of member '0' has no row -1"),
        (edited("members", 0, "row", value="0"), r"\['row'\] is '0', expected a whole number"),
        (edited("members", 0, "row", value=True), r"\['row'\] is True, expected a whole number"),
        (edited("members", 0, "file", value="group-7"), r"no data file 'group-7' for member '0'"),
        (edited("members", 0, "name", value="1"), r"two members named '1'"),
        (edited("members", 0, "name", value=None), r"\['name'\] is None, expected a text"),
        (
            edited("members", 0, "framework", value="caffe"),
            r"is of 'caffe', which this version",
        ),
        (edited("members", 0, "arguments", value=[1]), r"\['arguments'\] is \[1\], expected null or a mapping"),
        (edited("members", 0, "seed", value=1.5), r"\['seed'\] is 1.5, expected a whole number"),
        (edited("members", value=[]), r"it has no members"),
        (edited("members", value={}), r"\['members'\] is \{\}, expected a list"),
        (edited("members", 0, "seed", value=2**70), r"\['seed'\] is 11805\d+, expected a whole number from 0"),
        (edited("members", 0, "seed", value=-1), r"\['seed'\] is -1, expected a whole number from 0"),
        (twice, r"manifest.json can't be used: it is not valid JSON \(it has the key 'seed' twice\)"),
        (edited("seed", value="zero"), r"\['seed'\] is 'zero', expected a whole number"),
        (edited("files", "group-0", "rows", value=["0" * 32]), r"checksums of 1 rows for group-0.*which has 2"),
        (edited("files", "group-0", "rows", value=["0" * 32] * 2), r"the checksum of row 0 is .*expected 0000"),
        (edited("files", "group-0", "header", value="0" * 32), r"is damaged: its header has a wrong checksum"),
    ],
)
def test_a_damaged_folder_is_refused(damage: Callable[[Path], None], message: str, tmp_path: Path) -> None:
    mf.Fleet([mlp(), mlp()]).save(tmp_path)
    damage(tmp_path)
    with pytest.raises(mf.StoreError, match=message):
        mf.load(tmp_path, mlp)


@pytest.mark.parametrize(
    ("raised", "told"),
    [
        (ModuleNotFoundError("No module named 'safetensors'"), "'safetensors', which is not installed"),
        (ImportError("failed to map segment from shared object"), "failed to map segment"),
    ],
)
def test_only_a_package_that_is_not_there_is_to_be_installed(
    raised: ImportError, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Finder:
        @staticmethod
        def find_spec(name: str, path: object = None, target: object = None) -> None:
            if name == "safetensors":
                raise raised

    monkeypatch.delitem(sys.modules, "safetensors")
    monkeypatch.setattr(sys, "meta_path", [Finder, *sys.meta_path])
    with pytest.raises(ImportError, match=told):
        mf.Fleet([mlp()]).save(tmp_path)


def test_foreign_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(mf.StoreError, match="there is no folder"):
        mf.load(tmp_path / "nowhere", mlp)
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(mf.StoreError, match="was not saved by modelfleet"):
        mf.load(tmp_path, mlp)
    with pytest.raises(mf.StoreError, match=r"it holds 'notes.txt'. Nothing was written"):
        mf.Fleet([mlp()]).save(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
    fit(fleet_of(1), (X, Y), callbacks=[mf.Checkpoint(tmp_path / "run")])
    with pytest.raises(mf.StoreError, match="holds a checkpoint, not a fleet"):
        mf.load(tmp_path / "run", mlp)
    with pytest.raises(mf.StoreError, match="holds a checkpoint, not a fleet"):
        mf.Fleet([mlp()]).save(tmp_path / "run")


FULL_DISK = """
import resource, signal, sys
import modelfleet as mf
from tests.helpers import mlp
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
fleet = mf.Fleet.build(mlp, 1, width=10_000)
resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
try:
    fleet.save(sys.argv[1])
except mf.StoreError as error:
    print(error)
"""


def test_a_full_disk_keeps_the_old_copy(tmp_path: Path) -> None:
    fleet = mf.Fleet.build(mlp, 2)
    fleet.save(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", FULL_DISK, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    said = os.strerror(errno.EFBIG)
    assert f"{said}. What was saved there before is untouched. Free some space" in done.stdout, done.stderr
    assert equal(all_weights(mf.load(tmp_path, mlp)), all_weights(fleet))
