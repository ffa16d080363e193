"""Task of TensorFlow's own models: to predict, the only thing they can do in a fleet."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Task:
    """Prediction, the only task of these models."""

    summary: str = "predict"
    optimizer_name: str = "no optimizer"
