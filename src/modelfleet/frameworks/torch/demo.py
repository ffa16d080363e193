"""Torch side of `modelfleet demo`: the network, and a plain loop that trains a single one."""

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F


def network(init: int) -> nn.Module:
    """Return a small network for 8×8 digits. `init` seeds its weights."""
    torch.manual_seed(init)
    # Tanh, since the kink of ReLU can turn a rounding error in the last digit into a different gradient.
    return nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10))


def train_alone(
    model: nn.Module,
    train: tuple[np.ndarray, np.ndarray],
    validation: tuple[np.ndarray, np.ndarray],
    orders: np.ndarray,
    *,
    device: str,
    batch_size: int,
    lr: float,
    weight_decay: float,
) -> float:
    """Train one model in place by a plain loop, and return its final accuracy on the validation data.

    `orders` is `(epoch, row)`: the order of the rows in each epoch. As in a fleet, the loop records the loss and
    the accuracy of every epoch, and validates after each.
    """
    model.to(device)
    (x, y), (x_val, y_val) = (
        [torch.from_numpy(array).to(device) for array in pair] for pair in (train, validation)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=weight_decay)
    history: list[dict[str, float]] = []
    for order in torch.from_numpy(orders).to(device):
        loss_sum, right = torch.zeros((), device=device), torch.zeros((), device=device)
        for rows in order.split(batch_size):
            target = y[rows]
            optimizer.zero_grad()
            output = model(x[rows])
            loss = F.cross_entropy(output, target)
            loss.backward()
            optimizer.step()
            loss_sum += loss.detach() * len(target)
            right += (output.detach().argmax(1) == target).sum()
        with torch.no_grad():
            output = model(x_val)
            history.append(
                {
                    "loss": float(loss_sum) / len(x),
                    "accuracy": float(right) / len(x),
                    "val_loss": float(F.cross_entropy(output, y_val)),
                    "val_accuracy": float((output.argmax(1) == y_val).float().mean()),
                }
            )
    return history[-1]["val_accuracy"]
