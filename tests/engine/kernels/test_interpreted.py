"""Runs the tests of `interpreted_*` where Triton interprets kernels, which a process decides once."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip(
    "triton", minversion="3.7", reason="the interpreter before Triton 3.7 fails on loops with numpy 2.4"
)


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("marked", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
def test_kernels_agree_with_plain_torch_in_the_interpreter(marked):
    """A few tests of each kernel, or all the others."""
    tests = sorted(Path(__file__).parent.glob("interpreted_*.py"))
    assert tests
    options = ["-q", "-p", "no:cacheprovider", "--show-capture=no", "-m", marked]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *tests],
        cwd=Path(__file__).parents[3],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=3500,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
