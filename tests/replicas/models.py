"""Models for replicas, where workers can import them from. A row is `(mark, …)`: it says whose it is."""

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn


class Marked(nn.Module):
    """Gives `(mark, f(x))`: the owner's mark as it came, and something of the row itself."""

    def __init__(self, features: int = 4) -> None:
        super().__init__()
        self.head = nn.Linear(features, 1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x[:, :1], self.head(x[:, 1:])], 1)


class Refusing(Marked):
    """Raises if a row of the batch is poison: its second number is -666."""

    def forward(self, x: Tensor) -> Tensor:
        if (x[:, 1] == -666).any():
            raise ValueError("poison")
        return super().forward(x)


class Deadly(Marked):
    """Takes its process down if a row of the batch is poison."""

    def forward(self, x: Tensor) -> Tensor:
        if (x[:, 1] == -666).any():
            os.kill(os.getpid(), signal.SIGKILL)
        return super().forward(x)


class Hanging(Marked):
    """Does not end if a row of the batch is poison, until it is let go."""

    let_go = threading.Event()

    def forward(self, x: Tensor) -> Tensor:
        if (x[:, 1] == -666).any():
            self.let_go.wait()
        return super().forward(x)


class Keeping(nn.Module):
    """Keeps the last mark in a buffer and in a tensor of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("kept", torch.zeros(1))
        self.own = torch.zeros(1)

    def forward(self, x: Tensor) -> Tensor:
        self.kept.copy_(x[:1, 0])
        self.own.copy_(x[:1, 0])
        return x


class InPlace(nn.Module):
    """Doubles its rows where they are, and raises if one of them is poison."""

    def forward(self, x: Tensor) -> Tensor:
        poison = (x[:, 1] == -666).any()
        x.mul_(2)
        if poison:
            raise ValueError("poison")
        return x


class Reusing(nn.Module):
    """Gives its answers in memory that it writes again."""

    def __init__(self) -> None:
        super().__init__()
        self.out = torch.zeros(64, 5)

    def forward(self, x: Tensor) -> Tensor:
        self.out[: len(x)] = x
        return self.out[: len(x)]


class Closed(nn.Module):
    """Calls its dropout by a function that knows the model itself."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.5)
        self.act = lambda x: self.drop(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.act(x)


class Faulty(Marked):
    """On a poison row its device can compute no more, as a GPU after an index out of range."""

    def forward(self, x: Tensor) -> Tensor:
        if (x[:, 1] == -666).any():
            raise torch.AcceleratorError("device-side assert triggered")
        return super().forward(x)


class Leaving(Marked):
    """Ends the program when it is copied."""

    def __deepcopy__(self, memo: Any) -> Any:
        raise SystemExit(3)


class Greedy(Marked):
    """Has memory for four rows at a time."""

    def forward(self, x: Tensor) -> Tensor:
        if len(x) > 4:
            raise torch.OutOfMemoryError("Tried to allocate too much")
        return super().forward(x)


class Mixing(nn.Module):
    """Gives every row the number of different marks in its batch, and the device that it is on."""

    def forward(self, x: Tensor) -> Tensor:
        marks = float(len(torch.unique(x[:, 0])))
        device = float(os.environ.get("MODELFLEET_DEVICE", "cpu:0").partition(":")[2])
        return torch.tensor([[marks, device]]).expand(len(x), 2)


class Gated(Marked):
    """Answers nothing before its gate is open; tells when it is asked. For replicas of this process."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.asked = threading.Event(), threading.Event()
        self.batches: list[int] = []
        self.marks: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        self.batches.append(len(x))
        self.marks.extend(x[:, 0].tolist())
        self.asked.set()
        self.gate.wait()
        return super().forward(x)


class Where(nn.Module):
    """Tells whether its weights, a buffer and a tensor of its own are in memory that processes share."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4096, dtype=dtype))
        self.register_buffer("kept", torch.ones(4096))
        self.own = torch.ones(4096)

    def forward(self, x: Tensor) -> Tensor:
        found = [_is_shared(tensor.data_ptr()) for tensor in (self.weight, self.kept, self.own)]
        return torch.tensor([found], dtype=torch.float32).expand(len(x), 3)


def _is_shared(address: int) -> bool:
    for line in Path("/proc/self/maps").read_text(encoding="ascii").splitlines():
        span, *_, name = line.split(maxsplit=5)
        first, last = (int(end, 16) for end in span.split("-"))
        if first <= address < last:
            return "/memfd:modelfleet" in name
    return False


class Unloadable(nn.Module):
    """Can be sent, and not be received."""

    def __reduce__(self) -> Any:
        return _refuse, ()


def _refuse() -> None:
    raise OSError("the weights' file is not on this machine")


class Pair(nn.Module):
    """Takes a dict, gives a dict."""

    def forward(self, left: Tensor, right: Tensor) -> dict[str, Tensor]:
        return {"sum": left + right, "first": left[:, 0]}


class Filling(nn.Module):
    """Makes a tensor of torch's default dtype in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x) + torch.full((3,), 1 / 3)


class Whole(nn.Module):
    """Answers of which each depends on all rows of the batch."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "mean":
            return x - x.mean(0)
        return x.softmax(0) if self.how == "softmax" else x.sort(0).values


class Process(Marked):
    """Tells in which process it is: `(mark, process)`. A poison row takes long."""

    def forward(self, x: Tensor) -> Tensor:
        if (x[:, 1] == -666).any():
            threading.Event().wait(3600)
        return torch.cat([x[:, :1].double(), torch.full((len(x), 1), os.getpid(), dtype=torch.float64)], 1)


class Stuck(Marked):
    """Never comes to be on its device, in this process or in another."""

    let_go = threading.Event()

    def __deepcopy__(self, memo: Any) -> Any:
        self.let_go.wait(3600)
        return self

    def __reduce__(self) -> Any:
        return _wait_for_ever, ()


def _wait_for_ever() -> None:
    threading.Event().wait(3600)


class Weighing(nn.Module):
    """Gives every row the same number: its weight, which an update changes."""

    def __init__(self, weight: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(weight))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight.expand(len(x), 1)


class Chaotic(Marked):
    """Does what the second number of a row says: raises, runs out of memory, or takes its process down."""

    RAISES, GREEDY, KILLED, FAULT = -1.0, -2.0, -3.0, -4.0

    def forward(self, x: Tensor) -> Tensor:
        codes = set(x[:, 1].tolist())
        if self.KILLED in codes:
            os.kill(os.getpid(), signal.SIGKILL)  # as the system does for want of memory
        if self.FAULT in codes:
            os.kill(os.getpid(), signal.SIGSEGV)
        if self.GREEDY in codes and len(x) > 2:
            raise torch.OutOfMemoryError("Tried to allocate too much")
        if self.RAISES in codes:
            raise ValueError("a bad row")
        time.sleep(0.002 * len(x))
        return super().forward(x)
