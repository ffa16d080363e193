"""Find out quickly whether programs can be compiled for the vector instructions of this processor.

torch compiles and runs three programs to find out, with all of its headers: a third of the time that it takes to
compile a small step for the first time. But it knows itself which instructions its own operations use here, and a
compiler refuses an option that it does not know within milliseconds.
"""

import os
import subprocess
from functools import cache
from typing import Literal

import torch


@cache
def knows_vectors() -> Literal[True] | None:
    """Return True if torch uses the processor's vectors and the compiler knows them; None if torch should try."""
    try:
        # Internals of torch 2.13.
        from torch._inductor.cpp_builder import get_cpp_compiler
        from torch._inductor.cpu_vec_isa import supported_vec_isa_list, x86_isa_checker

        processor = x86_isa_checker()
        usable = [isa for isa in supported_vec_isa_list if all(flag in processor for flag in str(isa).split())]
        capability = torch.backends.cpu.get_cpu_capability()
        if not usable or f"CPU_CAPABILITY_{capability}" not in usable[0].build_macro():
            return None  # torch itself does not use the best instructions that there are
        for isa in usable:
            subprocess.run(
                [get_cpp_compiler(), *isa.build_arch_flags().split(), "-E", "-x", "c++", os.devnull],
                check=True,
                capture_output=True,
                timeout=10,
            )
    except Exception:  # another torch, or no compiler: then torch tries, and says what is wrong
        return None
    return True
