"""Damage on the disk: every flipped bit, lost byte and swapped file is noticed, or changes nothing.

`MODELFLEET_DAMAGES=1000` tries so many of every kind of folder; a few hundred in all without it.
"""

import os
import random
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.helpers import all_weights, equal, fit, fleet_of, mlp, toy, weights
from tests.manifests import older

import modelfleet as mf
from modelfleet import inspection
from modelfleet.frameworks import files as numpy_files
from modelfleet.store import read_folder, write_folder

TIMES = int(os.environ.get("MODELFLEET_DAMAGES", "120"))
SLOW = int(os.environ.get("MODELFLEET_DAMAGES", "40"))  # of what takes longer
X, Y = toy(12)

# --- the damages: each changes something in a folder


def flip_a_bit(path: Path, draw: random.Random) -> None:
    content = bytearray(path.read_bytes())
    content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    path.write_bytes(content)


def change_bytes(path: Path, draw: random.Random) -> None:
    content = bytearray(path.read_bytes())
    for _ in range(draw.randint(1, 8)):
        content[draw.randrange(len(content))] = draw.randrange(256)
    path.write_bytes(content)


def change_a_digit(path: Path, draw: random.Random) -> None:
    content = bytearray(path.read_bytes())
    digits = [place for place, byte in enumerate(content) if chr(byte).isdecimal()]
    content[draw.choice(digits or [0])] = ord(str(draw.randrange(10)))
    path.write_bytes(content)


def zero_a_stretch(path: Path, draw: random.Random) -> None:
    content = bytearray(path.read_bytes())
    start = draw.randrange(len(content))
    stop = min(len(content), start + draw.choice([1, 16, 512]))
    content[start:stop] = bytes(stop - start)
    path.write_bytes(content)


def swap_two_stretches(path: Path, draw: random.Random) -> None:
    content = bytearray(path.read_bytes())
    length = draw.randint(1, 16)
    one, other = (draw.randrange(max(1, len(content) - length)) for _ in range(2))
    content[one : one + length], content[other : other + length] = (
        content[other : other + length],
        content[one : one + length],
    )
    path.write_bytes(content)


def cut(path: Path, draw: random.Random) -> None:
    os.truncate(path, draw.randrange(path.stat().st_size))


def append(path: Path, draw: random.Random) -> None:
    with path.open("ab") as file:
        file.write(draw.randbytes(draw.randint(1, 20)))


def empty(path: Path, draw: random.Random) -> None:
    path.write_bytes(b"")


def delete(path: Path, draw: random.Random) -> None:
    path.unlink()


def make_a_folder(path: Path, draw: random.Random) -> None:
    path.unlink()
    path.mkdir()


def make_a_pipe(path: Path, draw: random.Random) -> None:
    path.unlink()
    os.mkfifo(path)


def lead_nowhere(path: Path, draw: random.Random) -> None:
    path.unlink()
    path.symlink_to(path.parent / draw.choice(["nowhere", path.name]))


def swap_files(path: Path, draw: random.Random) -> None:
    other = draw.choice(sorted(path.parent.iterdir()))
    held = path.read_bytes()
    path.write_bytes(other.read_bytes())
    other.write_bytes(held)


WITHIN = [flip_a_bit, change_bytes, change_a_digit, zero_a_stretch, swap_two_stretches]
DAMAGES: list[Callable[[Path, random.Random], None]] = [
    *WITHIN,
    *WITHIN,
    *WITHIN,
    *(cut, append, empty, delete, make_a_folder, make_a_pipe, lead_nowhere, swap_files),
]


def damaged(whole: Path, folder: Path, draw: random.Random) -> str:
    """Make a damaged copy of a folder; gives what was done to it."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(whole, folder)
    damage = draw.choice(DAMAGES)
    path = draw.choice(sorted(folder.iterdir()))
    damage(path, draw)
    return f"{damage.__name__} in {path.name.split('.')[0]}"


def tried(
    whole: Path,
    folder: Path,
    load: Callable[[Path], Any],
    expected: Any,
    same: Callable[[Any, Any], bool],
    times: int = TIMES,
) -> Counter[str]:
    """Damage copies of a folder over and over; gives how often that was noticed, and how often it was harmless."""
    counts: Counter[str] = Counter()
    for seed in range(times):
        what = damaged(whole, folder, random.Random(seed))
        try:
            found = load(folder)
        except mf.StoreError as error:
            if not str(error).endswith("."):
                pytest.fail(f"seed {seed}, {what}: not a sentence: {error}")
            counts["noticed"] += 1
        except BaseException as error:
            pytest.fail(f"seed {seed}, {what}: {type(error).__name__}: {error}")
        else:
            assert same(found, expected), f"seed {seed}, {what}: other numbers, and nothing was said"
            counts["harmless"] += 1
    print(f"{times} damages: {dict(counts)}")
    return counts


# --- what is damaged


def trees(tree: Any) -> Any:
    """Weights as plain lists, which can be compared exactly."""
    if isinstance(tree, dict):
        return {name: trees(value) for name, value in tree.items()}
    return tree.tobytes() if isinstance(tree, np.ndarray) else tree


@pytest.fixture(scope="module")
def fleet_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole") / "fleet"
    mf.Fleet.build(mlp, 4, width=mf.each([3, 5, 3, 5])).save(folder)
    return folder


def load_fleet(folder: Path, **options: Any) -> Any:
    return all_weights(mf.load(folder, mlp, **options))


def test_a_damaged_fleet(fleet_folder: Path, tmp_path: Path) -> None:
    counts = tried(fleet_folder, tmp_path / "copy", load_fleet, load_fleet(fleet_folder), equal)
    assert counts["noticed"] > TIMES * 0.8


@pytest.fixture(scope="module")
def trained_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fleet with a recipe and optimizer state."""
    folder = tmp_path_factory.mktemp("whole") / "trained"
    fleet = fleet_of(3, optimizer="adam", lr=mf.each([0.1, 0.2, 0.3]), schedule="cosine", metrics=["accuracy"])
    fit(fleet, (X, Y), batch_size=6)
    fleet.save(folder)
    return folder


def load_trained(folder: Path, **options: Any) -> Any:
    """Everything that the next fit starts with."""
    fleet = mf.load(folder, mlp, **options)
    states = {
        name: (own.state, own.steps.tolist(), own.epochs.tolist())
        for (name,), own in fleet._live_lanes.training_states()
    }
    return all_weights(fleet), states, {name: fleet._hyperparameters(name) for name in fleet.names}


def same_training(found: Any, expected: Any) -> bool:
    return (
        equal(found[0], expected[0])
        and found[2] == expected[2]
        and found[1].keys() == expected[1].keys()
        and all(
            equal(own[0], expected[1][name][0]) and own[1:] == expected[1][name][1:]
            for name, own in found[1].items()
        )
    )


def test_damaged_optimizer_state(trained_folder: Path, tmp_path: Path) -> None:
    expected = load_trained(trained_folder)
    assert expected[1]["2"][1:] == ([2], [1])
    counts = tried(trained_folder, tmp_path / "copy", load_trained, expected, same_training)
    assert counts["noticed"] > TIMES * 0.8

    def load(folder: Path) -> Any:
        try:
            return load_trained(folder, verify=False)
        except mf.FleetError as error:
            raise mf.StoreError(str(error)) from error

    tried(trained_folder, tmp_path / "copy", load, None, lambda found, expected: True)
    tried(trained_folder, tmp_path / "copy", inspection.describe, None, lambda found, expected: True)


def test_one_member_of_a_damaged_fleet(fleet_folder: Path, tmp_path: Path) -> None:
    def load(folder: Path) -> Any:
        return weights(mf.load(folder, mlp, members=["2"])["2"])

    counts = tried(fleet_folder, tmp_path / "copy", load, load(fleet_folder), equal)
    assert counts["harmless"] > 0  # what was damaged is another member's
    assert counts["noticed"] > TIMES * 0.5


def test_damage_that_is_not_looked_for_raises_nothing_raw(fleet_folder: Path, tmp_path: Path) -> None:
    def load(folder: Path) -> Any:
        try:
            return load_fleet(folder, verify=False)
        except mf.FleetError as error:
            raise mf.StoreError(str(error)) from error

    counts = tried(fleet_folder, tmp_path / "copy", load, None, lambda found, expected: True)
    assert counts["harmless"] > TIMES * 0.1  # wrong weights, as was asked for


def test_a_damaged_folder_of_an_earlier_version_raises_nothing_raw(fleet_folder: Path, tmp_path: Path) -> None:
    shutil.copytree(fleet_folder, tmp_path / "older")
    older(tmp_path / "older")
    assert equal(load_fleet(tmp_path / "older"), load_fleet(fleet_folder))

    def load(folder: Path) -> Any:
        try:
            return load_fleet(folder)
        except mf.FleetError as error:
            raise mf.StoreError(str(error)) from error

    tried(tmp_path / "older", tmp_path / "copy", load, None, lambda found, expected: True)


def test_damaged_arrays_of_numpy(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    arrays = {
        "kernel": draw.normal(size=(3, 4, 5)).astype(np.float32),
        "count": draw.integers(0, 9, (3,)),
        "mask": draw.random((3, 2)) > 0.5,
    }
    write_folder(
        tmp_path / "whole", {"group-0": arrays}, {"a": 1.5}, kind="fleet", writer=numpy_files, by_row=True
    )

    def load(folder: Path) -> Any:
        return read_folder(
            folder,
            lambda saved: ([saved.row("group-0", row, numpy_files) for row in range(3)], saved.manifest["a"]),
            kind="fleet",
        )

    def same(found: Any, expected: Any) -> bool:
        return [trees(row) for row in found[0]] == [trees(row) for row in expected[0]] and found[1] == expected[1]

    counts = tried(tmp_path / "whole", tmp_path / "copy", load, load(tmp_path / "whole"), same)
    assert counts["noticed"] > TIMES * 0.8


@pytest.fixture(scope="module")
def checkpoint_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was broken off."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    with pytest.raises(RuntimeError, match="killed"):
        train(folder, die=3)
    return folder


class Die(mf.Callback):
    def __init__(self, step: int | None) -> None:
        self.step = step

    def on_step_end(self, run: Any) -> None:
        if run.step == self.step:
            raise RuntimeError("killed")


def train(folder: Path, die: int | None = None, **options: Any) -> Any:
    fleet = fleet_of(2, momentum=0.9, lr=mf.each([0.1, 0.05]))
    before = all_weights(fleet)
    callbacks = [
        mf.EarlyStopping("loss", patience=9, restore_best=True),
        mf.Checkpoint(folder, every_steps=1, **options),
        Die(die),
    ]
    try:
        history = fit(fleet, (X, Y), epochs=2, batch_size=6, callbacks=callbacks, strategy="fused")
    except mf.StoreError:
        assert equal(all_weights(fleet), before), "weights were taken up from a damaged checkpoint"
        raise
    return all_weights(fleet), history.to_dict()


def test_a_damaged_checkpoint(checkpoint_folder: Path, tmp_path: Path) -> None:
    shutil.copytree(checkpoint_folder, tmp_path / "run")
    expected = train(tmp_path / "run")

    def same(found: Any, expected: Any) -> bool:
        return equal(found[0], expected[0]) and found[1] == expected[1]

    counts = tried(checkpoint_folder, tmp_path / "copy", train, expected, same, SLOW)
    assert counts["noticed"] > SLOW * 0.8


def test_inspecting_what_is_damaged(fleet_folder: Path, checkpoint_folder: Path, tmp_path: Path) -> None:
    for whole in (fleet_folder, checkpoint_folder):
        tried(whole, tmp_path / "copy", inspection.describe, None, lambda found, expected: True)


def test_saving_over_what_is_damaged(fleet_folder: Path, tmp_path: Path) -> None:
    fleet = mf.Fleet.build(mlp, 4, width=mf.each([3, 5, 3, 5]), seed=7)

    def save_and_load(folder: Path) -> Any:
        fleet.save(folder)
        return load_fleet(folder)

    counts = tried(fleet_folder, tmp_path / "copy", save_and_load, all_weights(fleet), equal, SLOW)
    assert counts["harmless"] > 0


# --- one by one


def test_a_flipped_bit_is_told_with_its_file(fleet_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "fleet"
    shutil.copytree(fleet_folder, folder)
    path = next(folder.glob("group-1.*"))
    content = bytearray(path.read_bytes())
    content[-1] ^= 1  # of the last member
    path.write_bytes(content)
    with pytest.raises(mf.StoreError, match=r"group-1\..*is damaged: the checksum of row 1 .*Load another copy\."):
        mf.load(folder, mlp)
    for members in (["0"], ["1"], ["2"]):
        assert mf.load(folder, mlp, members=members).names == members
    loaded = mf.load(folder, mlp, verify=False)
    assert equal(weights(loaded["0"]), weights(mf.load(fleet_folder, mlp)["0"]))


def test_a_damage_within_a_large_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from modelfleet.store import checksums

    monkeypatch.setattr(checksums, "BLOCK", 1 << 12)  # as if it were much larger
    monkeypatch.setattr(checksums, "_READ_SIZE", 1 << 9)
    models = [torch.nn.Sequential(torch.nn.Linear(20, 99), torch.nn.Linear(99, 3)) for _ in range(2)]

    def factory() -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Linear(20, 99), torch.nn.Linear(99, 3))

    mf.Fleet(models).save(tmp_path)
    assert equal(all_weights(mf.load(tmp_path, factory)), {str(k): weights(m) for k, m in enumerate(models)})
    path = next(tmp_path.glob("group-0.*"))
    size = path.stat().st_size
    for place in (size // 3, size // 2, size - 1):
        content = bytearray(path.read_bytes())
        content[place] ^= 4
        path.write_bytes(content)
        with pytest.raises(mf.StoreError, match=r"the checksum of row [01] is"):
            mf.load(tmp_path, factory)
        content[place] ^= 4
        path.write_bytes(content)
    assert len(mf.load(tmp_path, factory)) == 2


def test_only_the_bytes_of_the_members_asked_for_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from modelfleet.store import checksums

    mf.Fleet.build(mlp, 50, width=40).save(tmp_path)
    read: list[int] = []
    original = checksums._read
    monkeypatch.setattr(checksums, "_read", lambda file, length: read.append(length) or original(file, length))
    loaded = mf.load(tmp_path, mlp, members=["7"])
    assert sum(read) == sum(tensor.nbytes for tensor in weights(loaded["7"]).values())


def test_a_folder_that_is_saved_to_meanwhile_is_read_as_the_old_or_the_new_whole(tmp_path: Path) -> None:
    old, new = (mf.Fleet.build(mlp, 4, width=mf.each([3, 5, 3, 5])) for _ in range(2))
    for name in new.names:
        new[name].requires_grad_(False)[0].bias.add_(1)
    for moment in range(4):
        old.save(tmp_path)
        made: list[torch.nn.Module] = []

        def factory(width: int, moment: int = moment, made: list[torch.nn.Module] = made) -> torch.nn.Module:
            if len(made) == moment:
                new.save(tmp_path)
            made.append(mlp(width))
            return made[-1]

        loaded = all_weights(mf.load(tmp_path, factory))
        assert equal(loaded, all_weights(new)) or equal(loaded, all_weights(old))
        assert len(made) == 4, "no model is built twice"


def test_a_folder_whose_files_are_deleted_meanwhile_is_told(tmp_path: Path) -> None:
    mf.Fleet.build(mlp, 4, width=mf.each([3, 5, 3, 5])).save(tmp_path)

    def factory(width: int) -> torch.nn.Module:
        for path in tmp_path.glob("group-1.*"):
            path.unlink()
        return mlp(width)

    with pytest.raises(mf.StoreError, match=r"group-1\..* is missing\. Load another copy"):
        mf.load(tmp_path, factory)


def test_a_folder_can_be_reached_by_a_link(fleet_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(fleet_folder)
    assert equal(load_fleet(tmp_path / "link"), load_fleet(fleet_folder))
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "astray").symlink_to(tmp_path / "nowhere")
    for name in ("loop", "astray"):
        with pytest.raises(mf.StoreError):
            load_fleet(tmp_path / name)
        with pytest.raises(mf.StoreError):
            mf.Fleet([mlp()]).save(tmp_path / name)


def test_what_may_not_be_read_is_told(fleet_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = Path.open

    def refused(path: Path, *args: Any, **options: Any) -> Any:
        if path.suffix == ".safetensors":
            raise PermissionError(13, "Permission denied", str(path))
        return opened(path, *args, **options)

    monkeypatch.setattr(Path, "open", refused)
    with pytest.raises(mf.StoreError, match=r"safetensors can't be read: Permission denied"):
        load_fleet(fleet_folder)


def test_a_manifest_of_gigabytes_is_not_read(fleet_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "fleet"
    shutil.copytree(fleet_folder, folder)
    os.truncate(folder / "manifest.json", 5 << 30)  # a hole: it takes no room on the disk
    with pytest.raises(mf.StoreError, match=r"has 5,368,709,120 bytes, at most 1,073,741,824 are expected"):
        load_fleet(folder)


def test_a_checkpoint_that_is_not_looked_at_goes_on(checkpoint_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(checkpoint_folder, folder)
    path = next(folder.glob("lane-0.*"))
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(mf.StoreError, match=r"lane-0.*is damaged: the checksum of the file"):
        train(folder)
    assert path.exists(), "what is there stays, for whoever can mend it"
    train(folder, verify=False)
