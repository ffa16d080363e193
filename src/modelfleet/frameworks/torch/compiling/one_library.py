"""Compile all C++ kernels of a program as one library, instead of one library each.

torch starts the C++ compiler and the linker for each kernel, and binds each to Python by a hundred lines of its
own. For the small kernels of a train step that takes longer than the kernels themselves.

torch also compiles its headers first, which takes twice as long as a library of a small step with headers and all,
and is done again by every compile process, since torch keeps them beside its folder for temporary files.

Random numbers are 32-bit words that wrap. torch writes them as signed integers, with which a C++ compiler may
assume that nothing wraps, unless it is told so.
"""

import re
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

# As torch 2.13 writes them. What looks different is left to torch.
_INCLUDE = "#include <torch/csrc/inductor/cpp_prefix.h>"
_DECLARED = re.compile(r'(extern "C"\s+void\s+)kernel\(')
_BOUND = re.compile(r"static PyObject\* kernel_py\(.*?\n\}\n", re.DOTALL)
_TABLE = '{"kernel", kernel_py, METH_VARARGS, ""},'


@dataclass(frozen=True, eq=False)
class _Kernel:
    arguments: Sequence[str]
    source: str

    @property
    def joinable(self) -> bool:
        """Return True if the source is one include and one function."""
        lines = self.source.strip().splitlines()
        return (
            lines[0].strip() == _INCLUDE
            and self.source.count("#include") == 1
            and len(_DECLARED.findall(self.source)) == 1
            and bool(_DECLARED.match(next((line for line in lines[1:] if line.strip()), "")))
        )


@contextmanager
def one_library(*, wraps: bool = False) -> Iterator[None]:
    """Context in which a program that this thread compiles, or loads from torch's cache, is one library.

    With `wraps`, its integers may wrap.
    """
    try:
        from torch._inductor import codecache, cpp_builder
        from torch._inductor.async_compile import AsyncCompile

        single, wait = AsyncCompile.cpp_pybinding, AsyncCompile.wait
        bindings: Any = codecache.CppPythonBindingsCodeCache
        find_header: Callable[[str], str | None] = bindings._get_uncompiled_header
        find_flags: Callable[..., tuple[list[str], list[str]]] = cpp_builder._get_optimization_cflags
    except (ImportError, AttributeError):  # another release of torch
        yield
        return
    thread = threading.get_ident()

    def collect(self: Any, arguments: list[str], source: str) -> Any:
        mine = threading.get_ident() == thread
        return _Kernel(arguments, source) if mine else single(self, arguments, source)

    def compile_all(self: Any, scope: dict[str, Any]) -> None:
        kernels = {name: value for name, value in scope.items() if isinstance(value, _Kernel)}
        if kernels:
            scope.update(zip(kernels, _load(list(kernels.values()), bindings), strict=True))
        wait(self, scope)

    def header(device: str) -> str | None:
        return find_header(device) if threading.get_ident() != thread else None

    def flags(*args: Any, **kwargs: Any) -> tuple[list[str], list[str]]:
        for_compiler, for_linker = find_flags(*args, **kwargs)
        return [*for_compiler, "fwrapv"], for_linker

    changes: list[tuple[Any, str, Any]] = [
        (AsyncCompile, "cpp_pybinding", collect),
        (AsyncCompile, "wait", compile_all),
        (bindings, "_get_uncompiled_header", header),
        *([(cpp_builder, "_get_optimization_cflags", flags)] if wraps and sys.platform != "win32" else []),
    ]
    with ExitStack() as changed:
        for owner, name, value in changes:
            changed.callback(setattr, owner, name, vars(owner)[name])
            setattr(owner, name, value)
        yield


def _load(kernels: Sequence[_Kernel], bindings: Any) -> list[Any]:
    """Return kernels as functions. Those with the same source are one."""
    joined = list(dict.fromkeys((tuple(k.arguments), k.source) for k in kernels if k.joinable))
    text = _joined([_Kernel(*key) for key in joined], bindings) if len(joined) > 1 else None
    library = None if text is None else bindings.load_async(text, "cpu")()
    found = []
    for kernel in kernels:
        key = tuple(kernel.arguments), kernel.source
        if library is not None and key in joined:
            found.append(getattr(library, f"kernel_{joined.index(key)}"))
        else:
            found.append(bindings.load_pybinding(kernel.arguments, kernel.source))
    return found


def _joined(kernels: Sequence[_Kernel], bindings: Any) -> str | None:
    """Return the source of a library of kernels; None if torch binds them in a way that is not known here."""
    functions, bound, table, binding = [], [], [], ""
    for number, kernel in enumerate(kernels):
        name = f"kernel_{number}"
        functions.append(_DECLARED.sub(rf"\g<1>{name}(", kernel.source.replace(_INCLUDE, "")))
        arguments = ", ".join(
            f"parse_arg<{kind.replace('const ', '')}>(args, {at})" for at, kind in enumerate(kernel.arguments)
        )
        binding = bindings.suffix_template.format(
            arg_len=len(kernel.arguments),
            call_entry_func=f"{name}({arguments}); Py_RETURN_NONE;",
            entry_func="kernel",
            extra_parse_arg="",
        )
        own = _BOUND.search(binding)
        if own is None or _TABLE not in binding:
            return None
        bound.append(own[0].replace("kernel_py(", f"{name}_py("))
        table.append(_TABLE.replace('"kernel"', f'"{name}"').replace("kernel_py", f"{name}_py"))
    binding = _BOUND.sub(lambda _: "\n".join(bound), binding).replace(_TABLE, "\n".join(table))
    return "\n".join([_INCLUDE, *functions, binding])
