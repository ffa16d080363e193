import pytest
import torch

from modelfleet.devices import Device, parse_devices
from modelfleet.errors import InputError
from modelfleet.frameworks.torch.devices import accelerators, check, choose, native


@pytest.mark.parametrize(
    ("devices", "expected"),
    [
        ("cpu", (Device("cpu"),)),
        ("cuda:0", (Device("cuda", 0),)),
        ("mps", (Device("mps"),)),
        ("xpu:12", (Device("xpu", 12),)),
        ("cpu:0,cpu:1", (Device("cpu", 0), Device("cpu", 1))),
        (" cuda:1 , cpu,", (Device("cuda", 1), Device("cpu"))),
        (["cuda:0", "cuda:1"], (Device("cuda", 0), Device("cuda", 1))),
        (("cpu",), (Device("cpu"),)),
        ("auto", None),
        (["auto"], None),
    ],
)
def test_devices_are_read_by_name(devices: str | list[str], expected: tuple[Device, ...] | None) -> None:
    assert parse_devices(devices) == expected


@pytest.mark.parametrize("name", ["cpu", "cpu:1", "cuda:0", "mps", "xpu:3"])
def test_a_device_is_shown_as_it_is_written(name: str) -> None:
    parsed = parse_devices(name)
    assert parsed is not None
    assert str(parsed[0]) == name


@pytest.mark.parametrize(
    ("devices", "message"),
    [
        ("gpu:0", "unknown kind of device in 'gpu:0'. Known: cpu, cuda, mps, xpu."),
        ("CPU", "unknown kind of device in 'CPU'. Known: cpu, cuda, mps, xpu."),
        ("cpu:0,cpu:0", "device 'cpu:0' is named twice. Name each device once."),
        (["cuda", "cuda:1"], "devices 'cuda' and 'cuda:1' may be the same. Name them as 'cuda:0', …"),
        (["cpu:1", "cpu"], "devices 'cpu:1' and 'cpu' may be the same. Name them as 'cpu:0', …"),
        ("cuda:-1", "device 'cuda:-1' is not a kind and an index. Write it as in 'cuda:0'."),
        ("cuda:01", "device 'cuda:01' is not a kind and an index. Write it as in 'cuda:0'."),
        ("cuda:", "device 'cuda:' is not a kind and an index. Write it as in 'cuda:0'."),
        ("auto,cpu", '"auto" stands alone: say "auto", or name the devices.'),
        ("", 'no device was given. Name one, as in "cpu" or "cuda:0", or say "auto".'),
        ([], 'no device was given. Name one, as in "cpu" or "cuda:0", or say "auto".'),
        ([""], "device '' is not a kind and an index. Write it as in 'cuda:0'."),
        (0, 'devices=0 names no devices. Give "auto", a name as "cuda:0", or a list of names.'),
        (
            ["cpu", 1],
            'devices=[\'cpu\', 1] names no devices. Give "auto", a name as "cuda:0", or a list of names.',
        ),
    ],
)
def test_a_name_that_is_no_device_is_refused(devices: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_devices(devices)
    assert str(caught.value) == message


def test_torch_has_logical_cpus_as_many_as_are_named() -> None:
    chosen = choose(parse_devices("cpu:0,cpu:7"))
    assert chosen == (Device("cpu", 0), Device("cpu", 7))
    assert [native(device) for device in chosen] == [torch.device("cpu")] * 2


def test_torch_takes_each_accelerator_by_its_index() -> None:
    assert native(Device("cuda", 1)) == torch.device("cuda", 1)
    assert native(Device("mps")) == torch.device("mps")


def test_auto_is_what_torch_has_here() -> None:
    if torch.accelerator.is_available():
        chosen = choose(None)
        assert len(chosen) == torch.accelerator.device_count()
        assert [torch.empty(1, device=native(device)).device for device in chosen]
    else:
        assert choose(None) == (Device("cpu"),)


def test_an_accelerator_that_is_not_here_is_refused_with_those_that_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def two(check_available: bool = False) -> torch.device:
        return torch.device("cuda")

    monkeypatch.setattr(torch.accelerator, "current_accelerator", two)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    assert accelerators() == [Device("cuda", 0), Device("cuda", 1)]
    assert choose(None) == (Device("cuda", 0),)
    assert choose((Device("cuda"), Device("cpu"))) == (Device("cuda"), Device("cpu"))
    for absent in (Device("cuda", 2), Device("xpu")):
        with pytest.raises(InputError) as caught:
            check([Device("cuda", 1), absent])
        here = "torch sees cpu, cuda:0, cuda:1. Name one of these, or say 'auto'."
        assert str(caught.value) == f"device '{absent}' is not here: {here}"
