"""What `modelfleet doctor` says of torch on accelerators, with the facts of other machines."""

from collections.abc import Sequence

import pytest
import torch

from modelfleet.frameworks.doctor_rows import Row
from modelfleet.frameworks.torch import doctor_facts


def rows_of(
    monkeypatch: pytest.MonkeyPatch,
    kind: str | None,
    *,
    triton: str | None = "3.5",
    tf32: tuple[bool, bool] = (False, True),
    count: int = 1,
    apart: Sequence[tuple[int, int]] = (),
) -> dict[str, Row]:
    monkeypatch.setattr(doctor_facts, "accelerator_kind", lambda: kind)
    monkeypatch.setattr(doctor_facts, "triton_version", lambda: triton)
    monkeypatch.setattr(doctor_facts, "tf32", lambda: tf32)
    monkeypatch.setattr(doctor_facts, "pairs_without_access", lambda: list(apart))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: count)
    return {row.what: row for row in doctor_facts.accelerator_rows()}


def test_without_an_accelerator_there_is_nothing_to_say(monkeypatch: pytest.MonkeyPatch) -> None:
    assert rows_of(monkeypatch, None) == {}


def test_triton_is_named_with_its_version_or_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in ("cuda", "xpu"):
        assert rows_of(monkeypatch, kind)["triton"].here == "3.5"
        missing = rows_of(monkeypatch, kind, triton=None)["triton"]
        assert missing.here is None
        assert "pip install triton" in missing.advice
    assert "triton" not in rows_of(monkeypatch, "mps")


def test_tf32_is_told_for_products_and_convolutions(monkeypatch: pytest.MonkeyPatch) -> None:
    off = rows_of(monkeypatch, "cuda")["TF32"]
    assert off.here == "products off, convolutions on"
    assert 'set_float32_matmul_precision("high")' in off.advice
    on = rows_of(monkeypatch, "cuda", tf32=(True, False))["TF32"]
    assert (on.here, on.advice) == ("products on, convolutions off", "")


def test_gpus_that_can_not_reach_each_other_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "P2P" not in rows_of(monkeypatch, "cuda")
    assert rows_of(monkeypatch, "cuda", count=2)["P2P"].here == "between all GPUs"
    apart = rows_of(monkeypatch, "cuda", count=3, apart=[(0, 2), (1, 2)])["P2P"]
    assert apart.here == "not between cuda:0 and cuda:2, cuda:1 and cuda:2"
    assert "through the host" in apart.advice


def test_access_is_asked_for_in_both_directions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: (one, other) != (2, 0))
    assert doctor_facts.pairs_without_access() == [(0, 2)]


def test_tf32_is_read_from_torch() -> None:
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("high")
        assert doctor_facts.tf32()[0]
        torch.set_float32_matmul_precision("highest")
        assert not doctor_facts.tf32()[0]
    finally:
        torch.set_float32_matmul_precision(before)
