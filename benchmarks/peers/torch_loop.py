"""torch, one member after the other, eager: the loop that people write."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.nets import make_net
from benchmarks.peers import Round, serve
from benchmarks.rows import Row, datasets

Loss = Callable[[nn.Module, Tensor, Tensor], tuple[Tensor, Tensor]]


def loss_and_output(model: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """The mean cross-entropy of a batch, and the logits for the accuracy."""
    output = model(x)
    return F.cross_entropy(output, y), output


class Trainee:
    """One member: a module, its optimizer and its data on the device."""

    def __init__(self, row: Row, rate: float, x: Tensor, y: Tensor, *, fused: bool | None = None) -> None:
        self.model = make_net(row).to(x.device)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=rate, fused=fused)
        self.x, self.y = x, y

    def train_epoch(self, batch: int, loss_of: Loss = loss_and_output) -> tuple[float, float]:
        """One shuffled epoch; the mean loss and the accuracy, read once at its end."""
        device = self.x.device
        total, correct = torch.zeros((), device=device), torch.zeros((), dtype=torch.int64, device=device)
        for rows in torch.randperm(len(self.x), device=device).split(batch):
            x, y = self.x[rows], self.y[rows]
            self.optimizer.zero_grad()
            loss, output = loss_of(self.model, x, y)
            loss.backward()
            self.optimizer.step()
            total += loss.detach() * len(rows)
            correct += (output.detach().argmax(1) == y).sum()
        return total.item() / len(self.x), correct.item() / len(self.x)


def trainees(row: Row, members: range, *, fused: bool | None = None, device: str = "cpu") -> list[Trainee]:
    """The members of `row` with these numbers, each with its own rate and its own or the shared data."""
    data = [(torch.from_numpy(x).to(device), torch.from_numpy(y).to(device)) for x, y in datasets(row)]
    rates = row.rates()
    torch.manual_seed(0)
    return [Trainee(row, float(rates[member]), *data[member % len(data)], fused=fused) for member in members]


def train_all(row: Row, members: list[Trainee], loss_of: Loss = loss_and_output) -> Round:
    """One epoch of every member, one by one."""
    losses = [member.train_epoch(row.batch, loss_of)[0] for member in members]
    return Round(len(members) * row.steps, sum(losses) / len(losses))


def prepare(row: Row) -> Callable[[], Round]:
    members = trainees(row, range(row.alone))
    train_all(row, members[:2])
    return lambda: train_all(row, members)


if __name__ == "__main__":
    serve(prepare)
