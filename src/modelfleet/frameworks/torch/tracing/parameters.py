"""Make the tensors that stand for a model's parameters behave as parameters while a fused step runs.

A fused step gives a model tensors that are no `nn.Parameter`s, below `vmap` and `grad`. Questions about them, such
as `requires_grad`, are answered as the parameter would answer. Whatever would get a wrong result is refused.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode

from modelfleet.frameworks.errors import CannotFuseError

_functorch: Any = torch._C._functorch

_REQUIRES_GRAD: Any = vars(torch._C.TensorBase)["requires_grad"]
_IS_LEAF: Any = vars(torch._C.TensorBase)["is_leaf"]
_READS_VALUES = (Tensor.tolist, Tensor.numpy, Tensor.item, Tensor.__array__)


class NeedsGradientError(CannotFuseError):
    """Raised if a forward or an objective computes gradients itself, but runs where none are recorded."""


class _Step(Protocol):
    differentiates: bool
    """True if the step records gradients for the model's own use."""


class ParameterMode(TorchFunctionMode):
    """Context in which tensors answer for the parameters that they stand for.

    Args:
        parameters: For each name, the tensor and whether the parameter is trained.
        step: The step that runs.
    """

    def __init__(self, parameters: Mapping[str, tuple[Tensor, bool]], step: _Step) -> None:
        super().__init__()
        self._step = step
        self._trained = {id(tensor): trained for tensor, trained in parameters.values()}
        self._names = {id(tensor): name for name, (tensor, _) in parameters.items()}
        self._tensors = [tensor for tensor, _ in parameters.values()]  # kept alive, so that no id is used twice
        for tensor in self._tensors:
            tensor._is_param = True  # `isinstance(tensor, nn.Parameter)` looks at this

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        attribute = getattr(func, "__self__", None)
        if attribute is _REQUIRES_GRAD or attribute is _IS_LEAF:
            if func.__name__ == "__set__":
                self._refuse_switching(args[0])
            elif id(args[0]) in self._trained:
                return attribute is _IS_LEAF or self._trained[id(args[0])]
        elif func is Tensor.requires_grad_:
            self._refuse_switching(args[0])
        elif func is torch.autograd.grad:
            self._require_gradients()
            inputs = args[1] if len(args) > 1 else kwargs["inputs"]
            self._refuse_untracked([inputs] if isinstance(inputs, Tensor) else inputs)
        elif func is Tensor.backward or func is torch.autograd.backward:
            if _below_vmap():
                raise CannotFuseError("it calls backward() itself")
            self._require_gradients()
        elif func in _READS_VALUES and torch.compiler.is_compiling() and _is_real(args[0]):
            raise CannotFuseError("it reads the values of a tensor that is not part of the model")
        elif kwargs.get("generator") is not None and torch.compiler.is_compiling():
            raise CannotFuseError("it draws random numbers with a generator of its own")
        return func(*args, **kwargs)

    def _require_gradients(self) -> None:
        if not torch.is_grad_enabled() and not self._step.differentiates:
            raise NeedsGradientError("it computes gradients itself")

    def _refuse_switching(self, tensor: Tensor) -> None:
        if id(tensor) in self._names and torch.compiler.is_compiling():
            raise CannotFuseError(f"it switches requires_grad of its parameter {self._names[id(tensor)]}")
        self._refuse_untracked([tensor])

    def _refuse_untracked(self, tensors: Iterable[Tensor]) -> None:
        # `grad` does not see tensors that were not computed from the step's arguments: their gradient would be
        # missing.
        if _below_vmap() and not all(_functorch.is_gradtrackingtensor(tensor) for tensor in tensors):
            if not self._step.differentiates:
                raise NeedsGradientError("it computes gradients itself")
            raise CannotFuseError(
                "it differentiates with respect to a tensor that comes from neither the batch nor the model"
            )


def _below_vmap() -> bool:
    return _functorch.peek_interpreter_stack() is not None


def _is_real(tensor: Tensor) -> bool:
    return not (_functorch.is_functorch_wrapped_tensor(tensor) or isinstance(tensor, FakeTensor))
