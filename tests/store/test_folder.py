import hashlib
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.manifests import edit, older, put

from modelfleet.errors import FleetError, InputError, StoreError
from modelfleet.frameworks.torch import files
from modelfleet.store import Saved, read_folder, read_manifest, write_folder

OLD = {"w": torch.arange(12.0).reshape(3, 4), "b": torch.tensor([1, 2, 3])}
NEW = {"w": torch.ones(3, 4), "b": torch.tensor([7, 8, 9])}


def save(
    folder: Path,
    tensors: Mapping[str, torch.Tensor] = OLD,
    writer: Any = files,
    *,
    by_row: bool = False,
    **manifest: object,
) -> None:
    write_folder(folder, {"group-0": tensors}, manifest, kind="fleet", writer=writer, by_row=by_row)


def load(folder: Path) -> dict[str, torch.Tensor]:
    return read_folder(folder, lambda saved: saved.tensors("group-0", files), kind="fleet")


def row(folder: Path, row: int, name: str = "group-0") -> dict[str, torch.Tensor]:
    return read_folder(folder, lambda saved: saved.row(name, row, files), kind="fleet")


def held(folder: Path) -> list[str]:
    """The names in a folder, with the tokens taken out."""
    return sorted(re.sub(r"[0-9a-f]{16}", "*", path.name) for path in folder.iterdir())


def data_file(folder: Path) -> Path:
    return next(folder.glob("group-0.*.safetensors"))


def same(left: Mapping[str, torch.Tensor], right: Mapping[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(
        left[name].dtype == right[name].dtype and torch.equal(left[name], right[name]) for name in left
    )


def python(script: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", script, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=600)


# --- what goes in comes out


def test_tensors_of_every_kind_come_back(tmp_path: Path) -> None:
    base = torch.randn(6, 8)
    tensors = {
        "float32": base,
        "bfloat16": base.bfloat16(),
        "float16": base.half(),
        "float64": base.double(),
        "int64": torch.tensor([-(2**62), 5]),
        "bool": torch.tensor([True, False]),
        "complex64": torch.tensor([1 + 2j]).to(torch.complex64),
        "scalar": torch.tensor(3.5),
        "empty": torch.zeros(0, 3),
        "transposed": base.t(),
        "strided": base[:, ::2],
        "expanded": torch.tensor([1.0]).expand(4),
        "overlapping": base[1:],
        "parameter": torch.nn.Parameter(torch.randn(2)),
        "a/b.c ü": torch.ones(1),
    }
    save(tmp_path / "fleet", tensors)
    loaded = load(tmp_path / "fleet")
    assert same(loaded, tensors)
    assert not loaded["parameter"].requires_grad


def test_data_files_may_be_read_by_whom_the_manifest_may(tmp_path: Path) -> None:
    save(tmp_path)
    assert len({path.stat().st_mode for path in tmp_path.iterdir()}) == 1


def test_two_files_and_none(tmp_path: Path) -> None:
    both = {"group-0": OLD, "group-1": NEW}
    write_folder(tmp_path / "two", both, {}, kind="checkpoint", writer=files)

    def read(saved: Saved) -> dict[str, Any]:
        return {name: saved.tensors(name, files) for name in both}

    got = read_folder(tmp_path / "two", read, kind="checkpoint")
    assert all(same(got[name], both[name]) for name in both)
    write_folder(tmp_path / "none", {}, {"note": "x"}, kind="fleet", writer=files)
    assert read_manifest(tmp_path / "none", kind="fleet")["note"] == "x"


def test_the_manifest_comes_back_with_its_special_floats(tmp_path: Path) -> None:
    save(
        tmp_path / "fleet",
        losses=[math.inf, -math.inf, 0.1, 1e-300],
        rate=np.float32(0.5),
        steps=np.int64(2**62),
        frozen=np.bool_(True),
        nested={"ü": (1, None, "nan"), "seed": 2**63 - 1},
        nan=math.nan,
    )
    manifest = read_manifest(tmp_path / "fleet", kind="fleet")
    assert manifest["losses"] == [math.inf, -math.inf, 0.1, 1e-300]
    assert (manifest["rate"], manifest["steps"], manifest["frozen"]) == (0.5, 2**62, True)
    assert manifest["nested"] == {"ü": [1, None, "nan"], "seed": 2**63 - 1}
    assert math.isnan(manifest["nan"])
    json.loads((tmp_path / "fleet" / "manifest.json").read_text(), parse_constant=pytest.fail)


def test_the_manifest_lists_files_sizes_and_tensors(tmp_path: Path) -> None:
    save(tmp_path)
    entry = read_manifest(tmp_path, kind="fleet")["files"]["group-0"]
    assert entry["file"] == data_file(tmp_path).name
    assert entry["bytes"] == data_file(tmp_path).stat().st_size
    assert entry["tensors"] == {"w": {"dtype": "F32", "shape": [3, 4]}, "b": {"dtype": "I64", "shape": [3]}}
    assert entry["checksum"] == hashlib.sha256(data_file(tmp_path).read_bytes()).hexdigest()[:32]


@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_row_is_one_members_slice_and_keeps_nothing_else(tmp_path: Path, number: int) -> None:
    tensors = {**OLD, "h": torch.randn(3, 2, 2).bfloat16()}
    save(tmp_path, tensors, by_row=True)
    got = row(tmp_path, number)
    assert same(got, {name: tensor[number] for name, tensor in tensors.items()})
    assert got["w"].untyped_storage().nbytes() == 4 * 4


class SparseFiles:
    """Writes 1 GiB of float32 zeros, (1024, 256 * 1024), as a hole in the file; row 700 starts with a 1."""

    def write(self, path: Path, tensors: Mapping[str, Any]) -> None:
        entry = {"dtype": "F32", "shape": [1024, 256 * 1024], "data_offsets": [0, 1 << 30]}
        header = json.dumps({"w": entry}).encode()
        header += b" " * (-len(header) % 8)
        with path.open("wb") as file:
            file.write(len(header).to_bytes(8, "little") + header)
            start = file.tell()
            file.truncate(start + (1 << 30))
            file.seek(start + 700 * (1 << 20))
            file.write(np.float32(1).tobytes())


READ_ROW = """
import re, sys
from pathlib import Path
from modelfleet.frameworks.torch import files
import safetensors.torch
def peak():  # in kB, of this process: ru_maxrss may be its parent's
    return int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])
before = peak()
row = files.read_rows(Path(sys.argv[1]), 700, 701)[0]["w"]
grown = peak() - before
print(tuple(row.shape), row[0].item(), row.sum().item(), grown)
"""


def test_a_row_of_a_large_file_is_read_without_the_rest(tmp_path: Path) -> None:
    save(tmp_path, {"w": torch.empty(0)}, SparseFiles())
    done = python(READ_ROW, data_file(tmp_path))
    assert done.returncode == 0, done.stderr
    *what, grown = done.stdout.split()
    assert what == ["(262144,)", "1.0", "1.0"]
    assert int(grown) < 100 * 1024, "reading 1 MiB of 1 GiB took more than 100 MiB of memory"


def test_a_save_replaces_the_copy_and_nothing_else(tmp_path: Path) -> None:
    save(tmp_path)
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "model.safetensors").write_text("mine too")
    (tmp_path / "0123456789abcdef").mkdir()
    first = data_file(tmp_path).name
    save(tmp_path, NEW)
    assert same(load(tmp_path), NEW)
    assert data_file(tmp_path).name != first
    others = {"notes.txt", "model.safetensors", "0123456789abcdef"}
    assert {path.name for path in tmp_path.iterdir()} == {"manifest.json", data_file(tmp_path).name, *others}


# --- what can go wrong at a save

FULL_DISK = """
import errno, resource, signal, sys, torch
from pathlib import Path
from modelfleet.errors import StoreError
from modelfleet.frameworks.torch import files
from modelfleet.store import write_folder
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
def attempt(elements, note):
    tensors = {"a": {"w": torch.zeros(10)}, "group-0": {"w": torch.zeros(elements)}}
    try:
        write_folder(Path(sys.argv[1]), tensors, {"note": note}, kind="fleet", writer=files)
    except StoreError as error:
        assert isinstance(error.__cause__, OSError) and error.__cause__.errno == errno.EFBIG
        print(error)
attempt(1_000_000, "")
attempt(10, "x" * 1_000_000)
"""


def test_a_full_disk_leaves_the_old_copy(tmp_path: Path) -> None:
    save(tmp_path, note="old")
    before = {path.name for path in tmp_path.iterdir()}
    done = python(FULL_DISK, tmp_path)
    assert done.returncode == 0, done.stderr
    for message in done.stdout.splitlines():
        assert message == (
            f"{tmp_path} could not be written: File too large. "
            "What was saved there before is untouched. Free some space, or save to another disk."
        )
    assert len(done.stdout.splitlines()) == 2
    assert {path.name for path in tmp_path.iterdir()} == before
    assert same(load(tmp_path), OLD)
    assert read_manifest(tmp_path, kind="fleet")["note"] == "old"


# Saves without any framework, and is killed (-9) just before the n-th change that it makes on the disk.
KILLED = """
import json, os, shutil, signal, sys
from pathlib import Path
from modelfleet.store import write_folder
left = int(sys.argv[2])
def step():
    global left
    left -= 1
    if left < 0:
        os.kill(os.getpid(), signal.SIGKILL)
def dying(function):
    def call(*arguments, **keywords):
        step()
        return function(*arguments, **keywords)
    return call
for owner, names in [(os, "replace fsync"), (Path, "mkdir unlink write_bytes"), (shutil, "rmtree")]:
    for name in names.split():
        setattr(owner, name, dying(getattr(owner, name)))
class Halves:
    def write(self, path, tensors):
        header = json.dumps({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
        data = len(header).to_bytes(8, "little") + header + bytes(8)
        with path.open("wb", buffering=0) as file:
            file.write(data[:20])
            step()
            file.write(data[20:])
write_folder(Path(sys.argv[1]), {"group-0": {"w": None}}, {}, kind="fleet", writer=Halves())
print("whole")
"""


@pytest.mark.parametrize("first", [True, False])
def test_a_save_killed_anywhere_leaves_the_old_or_the_new_copy(tmp_path: Path, first: bool) -> None:
    seen = []
    for steps in range(20):
        folder = tmp_path / str(steps)
        folder.mkdir()
        if not first:
            save(folder)
        done = python(KILLED, folder, steps)
        if done.stdout == "whole\n":
            break
        assert done.returncode == -signal.SIGKILL, done.stderr
        if first and not (folder / "manifest.json").exists():
            seen.append("none")
        else:
            seen.append("old" if same(load(folder), OLD) else "new")
            assert seen[-1] == "old" or same(load(folder), {"w": torch.zeros(2)})
        save(folder, NEW)
        assert same(load(folder), NEW)
        assert held(folder) == ["group-0.*.safetensors", "manifest.json"], "the next save cleans up"
    else:
        pytest.fail("the save never came to its end")
    # mkdir, half the data, fsync, manifest, fsync, rename, fsync, replace; then fsync and the clean-up.
    assert seen == ["none" if first else "old"] * 8 + ["new"] * (2 if first else 3)


class FailingFiles:
    """Writes half, then raises."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def write(self, path: Path, tensors: Mapping[str, Any]) -> None:
        path.write_bytes(b"half")
        raise self.error

    read = staticmethod(files.read)
    read_rows = staticmethod(files.read_rows)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), MemoryError(), StoreError("bad tensor")])
def test_a_save_that_fails_tidies_up_and_says_why(tmp_path: Path, error: BaseException) -> None:
    save(tmp_path)
    with pytest.raises(type(error)) as caught:
        save(tmp_path, NEW, FailingFiles(error))
    assert caught.value is error
    assert held(tmp_path) == ["group-0.*.safetensors", "manifest.json"]
    assert same(load(tmp_path), OLD)


def test_a_first_save_that_fails_leaves_an_empty_folder_to_save_to(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"could not be written: no room\. What .* Save to another folder\."):
        save(tmp_path / "a" / "fleet", OLD, FailingFiles(OSError("no room")))
    assert held(tmp_path / "a" / "fleet") == []
    save(tmp_path / "a" / "fleet")
    assert same(load(tmp_path / "a" / "fleet"), OLD)


def test_ctrl_c_right_after_the_change_keeps_the_new_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path)
    replace = os.replace

    def interrupted(source: Path, target: Path) -> None:
        replace(source, target)
        if target.name == "manifest.json":
            raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        save(tmp_path, NEW)
    assert same(load(tmp_path), NEW)


def test_two_saves_at_once_do_not_spoil_each_other(tmp_path: Path) -> None:
    class Meanwhile:
        def write(self, path: Path, tensors: Mapping[str, Any]) -> None:
            with pytest.raises(StoreError, match=r"another save into .* is going on"):
                save(tmp_path)
            files.write(path, tensors)

    save(tmp_path, NEW, Meanwhile())
    assert same(load(tmp_path), NEW)
    save(tmp_path)
    assert same(load(tmp_path), OLD)


def test_a_save_is_never_mixed_into_something_else(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(StoreError, match=r"is not empty and was not saved by modelfleet: it holds 'notes\.txt'"):
        save(tmp_path)
    (tmp_path / "manifest.json").write_text('{"name": "a web page"}')
    with pytest.raises(StoreError, match=r"not written by modelfleet\. .* Nothing was written"):
        save(tmp_path)
    with pytest.raises(StoreError, match=r"notes\.txt is a file\. Save to a folder"):
        save(tmp_path / "notes.txt")
    with pytest.raises(StoreError, match=r"could not be written: Not a directory"):
        save(tmp_path / "notes.txt" / "fleet")
    assert held(tmp_path) == ["manifest.json", "notes.txt"]


def test_a_checkpoint_never_overwrites_a_fleet(tmp_path: Path) -> None:
    save(tmp_path)
    with pytest.raises(StoreError, match="holds a fleet, not a checkpoint"):
        write_folder(tmp_path, {}, {}, kind="checkpoint", writer=files)
    assert same(load(tmp_path), OLD)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            {"recipe": {"loss": [1, print]}},
            r"manifest\['recipe'\]\['loss'\]\[1\] is a builtin_function_or_method",
        ),
        ({"recipe": {3: 1}}, r"manifest\['recipe'\] has the key 3"),
        ({"recipe": {"$float": "nan"}}, r"has the key '\$float'"),
        ({"files": 1}, "key 'files' is reserved"),
    ],
)
def test_what_json_cannot_hold_is_refused_by_its_path(
    tmp_path: Path, content: dict[str, Any], message: str
) -> None:
    with pytest.raises(FleetError, match=message):
        write_folder(tmp_path / "fleet", {}, content, kind="fleet", writer=files)
    assert not (tmp_path / "fleet").exists()


@pytest.mark.parametrize("name", ["../x", "/etc/x", "a/b", "a\\b", "", ".", "A", "x.y"])
def test_a_data_file_is_never_named_as_a_path(tmp_path: Path, name: str) -> None:
    with pytest.raises(InputError, match="a data file can't be named"):
        write_folder(tmp_path, {name: OLD}, {}, kind="fleet", writer=files)


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (torch.zeros(2, dtype=torch.complex128), "does not support torch.complex128"),
        (torch.eye(2).to_sparse(), "tensor 'w' is torch.sparse_coo"),
    ],
)
def test_a_tensor_that_the_format_cannot_hold_is_refused(
    tmp_path: Path, tensor: torch.Tensor, message: str
) -> None:
    with pytest.raises(StoreError, match=message):
        save(tmp_path, {"w": tensor})


# --- what can be wrong with a folder


def test_what_is_not_a_saved_folder(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"there is no folder .*nowhere"):
        read_manifest(tmp_path / "nowhere", kind="fleet")
    with pytest.raises(StoreError, match=r"holds no manifest\.json"):
        read_manifest(tmp_path, kind="fleet")
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match="file is a file"):
        read_manifest(tmp_path / "file", kind="fleet")
    (tmp_path / "manifest.json").mkdir()
    with pytest.raises(StoreError, match=r"manifest.json can't be read: it is a folder"):
        read_manifest(tmp_path, kind="fleet")


ENTRY = ("files", "group-0")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (put("format", value="other"), "not written by modelfleet"),
        (put("version", value=3), "format version is 3, newer than 2. Upgrade modelfleet"),
        (put("version", value="1"), "format version is '1'"),
        (put("version", value=0), "format version is 0"),
        (put("kind", value="checkpoint"), "holds a checkpoint, not a fleet"),
        (put("kind", value=None), r"\['kind'\] is None, expected a text"),
        (put("files", value=[]), r"\['files'\] is \[\], expected a mapping"),
        (put("files", value={}), "holds no data file 'group-0'. Its data files: none"),
        (put(*ENTRY, value=3), r"\['group-0'\] is 3, expected a mapping"),
        (put(*ENTRY, "file", value="group-1.0123456789abcdef.safetensors"), "can't be 'group-1"),
        (put(*ENTRY, "file", value="group-0.0123456789abcdef.safetensors"), "is missing. Load another copy"),
        (put(*ENTRY, "bytes", value=1), r"has \d+ bytes, expected 1\."),
        (put(*ENTRY, "bytes", value="many"), r"\['bytes'\] is 'many', expected a whole number"),
        (
            put(*ENTRY, "tensors", "w", value=[]),
            "tensor 'w' of 'group-0' can't be used: it has no dtype and shape",
        ),
        (put(*ENTRY, "tensors", "w", "shape", value=[-1]), r"can't be used: its shape is \[-1\]"),
        (put(*ENTRY, "tensors", "w", "shape", value="3"), "can't be used: its shape is '3'"),
        (put(*ENTRY, "checksum", value="0" * 32), "is damaged: the checksum of the file is .*, expected 0000"),
        (put(*ENTRY, "checksum", value=3), r"\['checksum'\] is 3, expected a text"),
        (
            lambda manifest: manifest["files"]["group-0"].pop("checksum"),
            "no checksum for the data file of 'group-0'",
        ),
        (put(*ENTRY, "tensors", "w", "shape", value=[3, 5]), r"'w' is F32 \[3, 4\], expected F32 \[3, 5\]"),
        (put(*ENTRY, "tensors", "w", "dtype", value="I32"), r"'w' is F32 \[3, 4\], expected I32 \[3, 4\]"),
        (put(*ENTRY, "tensors", value={}), "tensor '[bw]' was not expected"),
        (put(*ENTRY, "tensors", "z", value={"dtype": "F32", "shape": []}), "tensor 'z' is missing"),
        (put("x", value={"$float": "big"}), r"not valid JSON \(\$float is 'big'\)"),
    ],
)
def test_a_manifest_that_does_not_fit(
    tmp_path: Path, change: Callable[[dict[str, Any]], None], message: str
) -> None:
    save(tmp_path)
    edit(tmp_path, change)
    with pytest.raises(StoreError, match=message):
        load(tmp_path)


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"3", b"\xff\xfe", b"[" * 100_000, b'{"format": NaN}'])
def test_a_manifest_that_is_not_ours(tmp_path: Path, text: bytes) -> None:
    (tmp_path / "manifest.json").write_bytes(text)
    with pytest.raises(StoreError, match=r"manifest\.json can't be used: it (is not|was not|is nested)"):
        read_manifest(tmp_path, kind="fleet")


@pytest.mark.parametrize("file", ["../outside.safetensors", "/outside", "..", "", "a\0b", "manifest.json", None])
def test_a_manifest_never_leads_out_of_the_folder(tmp_path: Path, file: str | None) -> None:
    save(tmp_path)
    edit(tmp_path, put("files", "group-0", "file", value=file))
    with pytest.raises(
        StoreError, match=r"the data file of 'group-0' can't be|\['file'\] is None, expected a text"
    ):
        read_manifest(tmp_path, kind="fleet")


def test_a_truncated_data_file(tmp_path: Path) -> None:
    save(tmp_path)
    os.truncate(data_file(tmp_path), 100)
    with pytest.raises(StoreError, match=r"has 100 bytes, expected \d+\. Load another copy"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b"\xff" * 8, r"its header claims 18,446,744,073,709,551,615 bytes, the file has \d+\."),
        ((233).to_bytes(8, "little"), "its header claims 233 bytes"),
        ((0).to_bytes(8, "little"), "its header is not that of a safetensors file"),
        ((4).to_bytes(8, "little") + b"[{}]", "its header is not that"),
        ((7).to_bytes(8, "little") + b'{"w":3}', "its header is not that"),
        ((2).to_bytes(8, "little") + b"{}", "does not fit its manifest: tensor '[bw]' is missing"),
    ],
)
def test_a_corrupt_header(tmp_path: Path, header: bytes, message: str) -> None:
    save(tmp_path)
    with data_file(tmp_path).open("r+b") as file:
        file.write(header)
    with pytest.raises(StoreError, match=message):
        load(tmp_path)


def test_tensors_that_reach_beyond_the_file(tmp_path: Path) -> None:
    save(tmp_path)
    path = data_file(tmp_path)
    path.write_bytes(re.sub(rb"\[(\d),(\d+)\]", rb"[9,\2]", path.read_bytes(), count=1))
    with pytest.raises(StoreError, match=r"the checksum of the file is"):
        load(tmp_path)
    older(tmp_path)
    with pytest.raises(
        StoreError, match=r"can't be read: Error while deserializing header|not that of a safetensors"
    ):
        load(tmp_path)


def test_a_row_that_is_not_there(tmp_path: Path) -> None:
    save(tmp_path, {"w": OLD["w"]}, by_row=True)
    for number in (-1, 3):
        with pytest.raises(InputError, match=rf"tensor 'w' .* has no row {number}: its shape is \(3, 4\)"):
            row(tmp_path, number)
    save(tmp_path, {**OLD, "scalar": torch.tensor(1)}, by_row=True)
    with pytest.raises(InputError, match=r"tensor 'scalar' .* its shape is \(\)"):
        row(tmp_path, 0)
    with pytest.raises(StoreError, match=r"holds no data file 'group-9'\. Its data files: group-0"):
        row(tmp_path, 0, name="group-9")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    save(folder, {**OLD, "h": torch.randn(3, 2).bfloat16()}, losses=[0.5, math.nan], names=["a", "b"])
    return folder


@settings(deadline=None)
@given(
    what=st.sampled_from(["manifest", "header"]),
    flips=st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255)), max_size=4),
    cut=st.none() | st.floats(0, 1),
)
def test_no_damage_gives_anything_but_an_error_or_the_tensors(
    saved: Path, what: str, flips: list[tuple[float, int]], cut: float | None
) -> None:
    expected = {name: (tensor.shape, tensor.dtype) for name, tensor in load(saved).items()}
    with TemporaryDirectory() as place:
        folder = Path(place) / "fleet"
        shutil.copytree(saved, folder)
        path = folder / "manifest.json" if what == "manifest" else data_file(folder)
        content = bytearray(path.read_bytes())
        reach = len(content) if what == "manifest" else 8 + int.from_bytes(content[:8], "little")
        for where, byte in flips:
            content[int(where * reach)] = byte
        path.write_bytes(content if cut is None else content[: int(cut * len(content))])
        try:
            loaded = load(folder)
        except StoreError:
            return
        assert {name: (tensor.shape, tensor.dtype) for name, tensor in loaded.items()} == expected
