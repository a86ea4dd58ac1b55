"""Finds out whether torch.compile can make code for a CPU here, before anything is loaded or compiled."""

from __future__ import annotations

import functools
import subprocess


def find_cpp_compiler_problem() -> str | None:
    """What is wrong with the C++ compiler that torch.compile would take, as half a sentence; None: it compiles C++."""
    from torch._inductor.cpp_builder import get_cpp_compiler  # late: it takes seconds
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        compiler = get_cpp_compiler()
    except InvalidCxxCompiler:
        return "no compiler was found"
    except OSError as error:
        return f"the compiler cannot be run ({error})"
    return None if _knows_cpp(compiler) else f"{compiler} is no C++ compiler"


@functools.cache
def _knows_cpp(compiler: str) -> bool:
    """Whether it has the language's own macro; PyTorch is content with any program that takes --version."""
    command = [compiler, "-x", "c++", "-E", "-dM", "-"]
    try:
        macros = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return False
    return b"__cplusplus" in macros
