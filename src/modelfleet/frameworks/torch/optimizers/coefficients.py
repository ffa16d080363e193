"""Coefficients of a step, one number per member, and torch's operations between tensors and such numbers.

Coefficients are computed in float64, since `1 - 0.999**t` in float32 is off by 6e-5. Only then are they cast to
the dtype in which the parameter's operations compute: float32 for bfloat16 and float16, as torch does with a
Python number.
"""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor


class Coefficients:
    """Coefficients of a step, with torch's operations between a tensor and a Python number.

    Each operation computes in the tensor's own dtype, or in float32 if that is narrower, and rounds its result
    once. `c["beta2"]` is the number of each member, in that dtype and of shape `(member, 1, …, 1)`.
    """

    def __init__(self, coefficients: Mapping[str, Tensor], param: Tensor) -> None:
        self.coefficients = coefficients
        self.dtype = param.dtype
        self.compute_dtype = computing(param.dtype)
        self.narrow = self.compute_dtype != param.dtype
        self._axes = param.dim()
        self._rounds_addend = self.narrow and param.device.type == "cpu"

    def __getitem__(self, name: str) -> Tensor:
        return self.wide(self.coefficients[name])

    def wide(self, value: Tensor) -> Tensor:
        """Return numbers `(member,)` in the form of `c[…]`."""
        return one_per_member(value, self.compute_dtype, self._axes)

    def up(self, tensor: Tensor) -> Tensor:
        """Cast a tensor to the dtype in which operations compute."""
        return tensor.to(self.compute_dtype)

    def down(self, tensor: Tensor) -> Tensor:
        """Round a result to the parameter's dtype."""
        return tensor.to(self.dtype)

    def times(self, tensor: Tensor, name: str) -> Tensor:
        """Return `tensor * number`."""
        return self.down(self.up(tensor) * self[name])

    def over(self, tensor: Tensor, name: str) -> Tensor:
        """Return `tensor / number`."""
        return self.down(self.up(tensor) / self[name])

    def plus(self, tensor: Tensor, name: str) -> Tensor:
        """Return `tensor + number`."""
        return self.down(self.up(tensor) + self._addend(name))

    def plus_scaled(self, tensor: Tensor, other: Tensor, name: str) -> Tensor:
        """Return `tensor.add(other, alpha=number)`."""
        return self.down(torch.addcmul(self.up(tensor), self.up(other), self._addend(name)))

    def lerp(self, start: Tensor, end: Tensor, name: str) -> Tensor:
        """Return `start.lerp(end, number)`."""
        return self.down(torch.lerp(self.up(start), self.up(end), self[name]))

    def plus_product(self, tensor: Tensor, first: Tensor, second: Tensor, name: str) -> Tensor:
        """Return `tensor.addcmul(first, second, value=number)`."""
        return self.down(torch.addcmul(self.up(tensor), self.up(first) * self[name], self.up(second)))

    def plus_ratio(self, tensor: Tensor, first: Tensor, second: Tensor, number: str | Tensor) -> Tensor:
        """Return `tensor.addcdiv(first, second, value=number)`."""
        value = self[number] if isinstance(number, str) else self.wide(number)
        return self.down(torch.addcdiv(self.up(tensor), self.up(first) * value, self.up(second)))

    def decayed(self, tensor: Tensor, name: str, added: Tensor, weight: str | None = None) -> Tensor:
        """Return `tensor.mul(number).add(added, alpha=weight)`."""
        if self.narrow:
            tensor = self.times(tensor, name)
            return tensor + added if weight is None else self.plus_scaled(tensor, added, weight)
        return torch.addcmul(added if weight is None else added * self[weight], tensor, self[name])

    def _addend(self, name: str) -> Tensor:
        # On the CPU, only `add` rounds a Python number, and its alpha, to the tensor's own dtype.
        return self.up(self.down(self[name])) if self._rounds_addend else self[name]

    def square_average(self, average: Tensor, grad: Tensor, decay: str, weight: str) -> Tensor:
        """Return `average.mul(decay).addcmul(grad, grad, value=weight)`."""
        return self.plus_product(self.times(average, decay), grad, grad, weight)


def computing(dtype: torch.dtype) -> torch.dtype:
    """Return the real dtype in which operations on `dtype` compute: float32 for narrower dtypes."""
    if dtype.is_complex:
        dtype = dtype.to_real()
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


def widest(params: Iterable[Tensor]) -> torch.dtype:
    """Return the dtype in which the widest of some parameters computes: float32 or wider."""
    dtype = torch.float32
    for parameter in params:
        dtype = torch.promote_types(dtype, computing(parameter.dtype))
    return dtype


def pairs(tensor: Tensor) -> Tensor:
    """Return a complex tensor as a view of pairs of real numbers, and a real tensor as it is."""
    return torch.view_as_real(tensor.resolve_conj().resolve_neg()) if tensor.is_complex() else tensor


def one_per_member(value: Tensor, dtype: torch.dtype, axes: int) -> Tensor:
    """Reshape numbers `(member,)` so that they broadcast over a tensor `(member, …)` with `axes` axes."""
    return value.to(dtype).reshape(-1, *[1] * (axes - 1))
