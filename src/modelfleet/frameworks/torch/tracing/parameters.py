"""What a model's Python asks torch while it runs for a member in place of its own weights.

A fused step gives a model tensors that are no `nn.Parameter`s, below `vmap` and `grad`. Here they answer as the
parameters do that they stand for; and what would be answered wrongly is refused.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode

from modelfleet.frameworks.protocol import CannotFuseError

_functorch: Any = torch._C._functorch

_REQUIRES_GRAD: Any = vars(torch._C.TensorBase)["requires_grad"]
_IS_LEAF: Any = vars(torch._C.TensorBase)["is_leaf"]
_READING = (Tensor.tolist, Tensor.numpy, Tensor.item, Tensor.__array__)


class NeedsGradientError(CannotFuseError):
    """A forward or an objective takes gradients itself, and runs where none are kept."""


class Reads(Protocol):
    """What `ParameterMode` has to know of the step."""

    differentiates: bool


class ParameterMode(TorchFunctionMode):
    """Answers for the tensors that stand for parameters, and refuses what a fused step would get wrong.

    `parameters` maps the name of each to the tensor and whether it is trained.
    """

    def __init__(self, parameters: Mapping[str, tuple[Tensor, bool]], step: Reads) -> None:
        super().__init__()
        self._step = step
        self._trained = {id(tensor): trained for tensor, trained in parameters.values()}
        self._names = {id(tensor): name for name, (tensor, _) in parameters.items()}
        self._tensors = [tensor for tensor, _ in parameters.values()]  # so that no id is used twice
        for tensor in self._tensors:
            tensor._is_param = True  # what `isinstance(tensor, nn.Parameter)` asks

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        about = getattr(func, "__self__", None)
        if about is _REQUIRES_GRAD or about is _IS_LEAF:
            if func.__name__ == "__set__":
                self._refuse_switching(args[0])
            elif id(args[0]) in self._trained:
                return about is _IS_LEAF or self._trained[id(args[0])]
        elif func is Tensor.requires_grad_:
            self._refuse_switching(args[0])
        elif func is torch.autograd.grad:
            self._ask_for_gradients()
            inputs = args[1] if len(args) > 1 else kwargs["inputs"]
            self._refuse_untracked([inputs] if isinstance(inputs, Tensor) else inputs)
        elif func is Tensor.backward or func is torch.autograd.backward:
            if _mapped():
                raise CannotFuseError("it calls backward() itself")
            self._ask_for_gradients()
        elif func in _READING and torch.compiler.is_compiling() and _is_real(args[0]):
            raise CannotFuseError("it reads the values of a tensor that is no part of the model")
        elif kwargs.get("generator") is not None and torch.compiler.is_compiling():
            raise CannotFuseError("it draws random numbers with a generator of its own")
        return func(*args, **kwargs)

    def _ask_for_gradients(self) -> None:
        if not torch.is_grad_enabled() and not self._step.differentiates:
            raise NeedsGradientError("it takes gradients itself")

    def _refuse_switching(self, tensor: Tensor) -> None:
        if id(tensor) in self._names and torch.compiler.is_compiling():
            raise CannotFuseError(f"it switches requires_grad of its parameter {self._names[id(tensor)]}")
        self._refuse_untracked([tensor])

    def _refuse_untracked(self, tensors: Iterable[Tensor]) -> None:
        # What was not made of the step's arguments is not seen by `grad`: its gradient would be missing.
        if _mapped() and not all(_functorch.is_gradtrackingtensor(tensor) for tensor in tensors):
            if not self._step.differentiates:
                raise NeedsGradientError("it takes gradients itself")
            raise CannotFuseError("it differentiates by a tensor that comes neither from the batch nor the model")


def _mapped() -> bool:
    """Whether this runs below `vmap`."""
    return _functorch.peek_interpreter_stack() is not None


def _is_real(tensor: Tensor) -> bool:
    return not (_functorch.is_functorch_wrapped_tensor(tensor) or isinstance(tensor, FakeTensor))
