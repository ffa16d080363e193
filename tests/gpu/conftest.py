"""Tests for a GPU. On the stand-in accelerator those of them run that it can run, so that they stay right."""

import pytest
import torch


@pytest.fixture(autouse=True)
def _exact(monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.is_available():  # TF32, which torch uses for convolutions, has 10 binary digits
        monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


@pytest.fixture
def one() -> str:
    """The first device."""
    from tests.gpu.device import KIND  # not before: without a device the import skips

    return f"{KIND}:0"


@pytest.fixture
def cuda(one: str) -> str:
    """The first GPU, for what the stand-in does not have."""
    if not one.startswith("cuda"):
        pytest.skip("only a GPU has this")
    return one


@pytest.fixture
def both(one: str) -> str:
    """Two devices."""
    if torch.accelerator.device_count() < 2:
        pytest.skip("there is only one device")
    return f"{one},{one.partition(':')[0]}:1"
