"""The stand-in accelerator itself: what it must do for tests on it to mean anything."""

import copy
import gc
import io
import pickle
from collections.abc import Callable

import pytest
import torch
from tests.standin.device import Told, limited, listening
from tests.standin.races import watching
from torch import Tensor, nn

ONE, TWO = torch.device("standin", 0), torch.device("standin", 1)


def told_of(run: Callable[[], object]) -> list[Told]:
    """What the devices are asked to do by a function."""
    found: list[Told] = []
    with listening(found.append):
        run()
    return found


def test_torch_finds_two_devices() -> None:
    assert torch.accelerator.current_accelerator() == torch.device("standin")
    assert torch.accelerator.device_count() == 2


def test_numbers_are_those_of_the_cpu() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3))
    there, x = copy.deepcopy(model).to(ONE), torch.randn(5, 1, 6, 6)
    for own, device in ((model, "cpu"), (there, ONE)):
        optimizer = torch.optim.AdamW(own.parameters(), 0.1)
        for _ in range(3):
            optimizer.zero_grad()
            own(x.to(device)).square().mean().backward()
            optimizer.step()
    for mine, other in zip(there.parameters(), model.parameters(), strict=True):
        assert mine.device == ONE
        assert torch.equal(mine.cpu(), other)


@pytest.mark.parametrize(
    "mix",
    [
        lambda x, y, host: x + y,
        lambda x, y, host: x @ host,
        lambda x, y, host: torch.cat([x, host]),
        lambda x, y, host: x.index_select(0, torch.tensor([0])),
        lambda x, y, host: nn.functional.linear(x, host),
        lambda x, y, host: nn.functional.conv1d(x[None], host[:, :, None]),
    ],
)
def test_devices_are_not_mixed(mix: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
    with pytest.raises(RuntimeError, match="same device"):
        mix(torch.ones(2, 2, device=ONE), torch.ones(2, 2, device=TWO), torch.ones(2, 2))


def test_views_share_memory_and_writes_are_counted() -> None:
    there, on_cpu = torch.zeros(4, 3, device=ONE), torch.zeros(4, 3)
    for x in (there, on_cpu):
        x.T[1] += 1
        x[2:].view(-1)[0] = 5
        x.unfold(0, 2, 2)[0].mul_(2)
    assert torch.equal(there.cpu(), on_cpu)
    assert there._version == on_cpu._version


def test_random_numbers_are_the_devices_own() -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = torch.rand(5, device=ONE)
    assert torch.equal(torch.get_rng_state(), before)
    assert not torch.equal(torch.rand(5, device=ONE), first)
    state = torch.get_device_module(ONE).get_rng_state(ONE)
    again = torch.rand(5, device=ONE)
    torch.get_device_module(ONE).set_rng_state(state, ONE)
    assert torch.equal(torch.rand(5, device=ONE), again)
    torch.manual_seed(1)
    assert torch.equal(torch.rand(5, device=ONE), first)


def test_tensors_are_pickled_saved_and_copied() -> None:
    model = nn.Linear(3, 2).to(TWO)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    again, copied = pickle.loads(pickle.dumps(model)), copy.deepcopy(model)
    for other in (loaded["weight"], again.weight, copied.weight):
        assert other.device == TWO
        assert torch.equal(other, model.weight)


def test_autocast_computes_products_in_half_precision() -> None:
    x, w = torch.randn(3, 3, device=ONE), torch.randn(3, 3, device=ONE)
    with torch.autocast("standin", dtype=torch.bfloat16):
        assert (x @ w).dtype == torch.bfloat16
        assert (x @ w).softmax(-1).dtype == torch.float32
    assert (x @ w).dtype == torch.float32


def test_what_the_host_waits_for_is_told() -> None:
    x = torch.arange(4.0, device=ONE)
    waits = {
        "item": lambda: x[0].item(),
        "d2h": lambda: x.cpu(),
        "h2d": lambda: torch.ones(2).to(ONE),
        "sync": lambda: torch.accelerator.synchronize(),
    }
    for kind, run in waits.items():
        assert [one.kind for one in told_of(run) if one.waits] == [kind]
    assert any(one.waits for one in told_of(lambda: x[x > 1]))  # how many there are decides the shape
    assert any(one.waits for one in told_of(lambda: x[torch.tensor([1])]))  # the index is copied
    assert not any(one.waits for one in told_of(lambda: torch.ones(2).pin_memory().to(ONE, non_blocking=True)))
    assert [one.kind for one in told_of(lambda: torch.ones(2).pin_memory())] == ["pinned"]
    assert {one.kind for one in told_of(lambda: (x * 2).sum())} == {"op"}


def test_memory_runs_out_at_a_chosen_size() -> None:
    gc.collect()  # fleets of other tests
    torch.accelerator.empty_cache()
    total = torch.accelerator.memory_reserved(ONE) + (1 << 20)
    with limited(0, total=total):
        kept = torch.zeros(1 << 17, device=ONE)  # half of it
        with pytest.raises(torch.OutOfMemoryError):
            torch.zeros(1 << 18, device=ONE)
        torch.zeros(1 << 18, device=TWO)
        del kept
        torch.zeros((1 << 18) - 512, device=ONE)  # what was cached is given back
        assert torch.accelerator.get_memory_info(ONE)[1] == total
    with limited(0, largest=1 << 12), pytest.raises(torch.OutOfMemoryError):
        torch.zeros(1 << 12, device=ONE)
    torch.zeros(1 << 18, device=ONE)


def test_a_race_is_found_and_an_order_is_not() -> None:
    with watching() as races:
        x, other = torch.zeros(100, device=ONE), torch.Stream(ONE)
        with other:
            x + 1
    assert [str(race) for race in races.found if "reads" in race.what]
    assert "does not wait for" in str(races.found[0])

    def waits_for_stream(x: Tensor, other: torch.Stream) -> None:
        other.wait_stream(torch.accelerator.current_stream(ONE))

    def waits_for_event(x: Tensor, other: torch.Stream) -> None:
        other.wait_event(torch.accelerator.current_stream(ONE).record_event())

    for order in (waits_for_stream, waits_for_event, lambda x, other: x.sum().item()):
        with watching() as races:
            x, other = torch.zeros(100, device=ONE), torch.Stream(ONE)
            order(x, other)
            with other:
                x + 1
        assert not races.found


def test_writing_over_what_another_stream_may_still_read_is_a_race() -> None:
    for waits in (False, True):
        with watching() as races:
            x, other = torch.zeros(100, device=ONE), torch.Stream(ONE)
            other.wait_stream(torch.accelerator.current_stream(ONE))
            with other:
                x + 1
            if waits:
                torch.accelerator.current_stream(ONE).wait_stream(other)
            x.add_(1)
        assert bool(races.found) != waits


def test_memory_that_is_freed_too_early_is_a_race() -> None:
    for told in (False, True):
        with watching() as races:
            x, other = torch.zeros(12345, device=ONE), torch.Stream(ONE)
            other.wait_stream(torch.accelerator.current_stream(ONE))
            with other:
                y = x + 1
            if told:
                x.record_stream(other)
            del x
            torch.ones(12345, device=ONE)  # in the same memory, unless it was told
        assert bool(races.found) != told
        del y
