"""Runs the tests of `interpreted_fused_kernels` where Triton interprets kernels, which a process decides once."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip(
    "triton", minversion="3.7", reason="the interpreter before Triton 3.7 fails on loops with numpy 2.4"
)


def test_kernels_agree_with_plain_torch_in_the_interpreter():
    tests = Path(__file__).with_name("interpreted_fused_kernels.py")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--show-capture=no", tests],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
