"""However a process with a driver ends, its stderr shows what the user's own code raised and nothing else."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
from transformers import Qwen3Config, Qwen3ForCausalLM
from cbexp.engine import CBSyncConfig, SyncCBDriver

config = Qwen3Config(vocab_size=97, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
                     num_key_value_heads=1, head_dim=8, eos_token_id=None, bos_token_id=None)

def on_step(index, info):
    if index == 2:
        exec({at_step_2!r})

settings = CBSyncConfig(max_new_tokens=5, num_blocks=8, max_burst=1, on_step=on_step)
driver = SyncCBDriver(Qwen3ForCausalLM(config), None, settings)
driver.add_requests([[1, 2, 3], [4]])
driver.drive_until_empty()
print("finished")
"""


def run(at_step_2):
    return subprocess.run(
        [sys.executable, "-c", SCRIPT.format(at_step_2=at_step_2)],
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_a_forgotten_close():
    result = run("pass")
    assert (result.returncode, result.stdout, result.stderr) == (0, "finished\n", "")


@pytest.mark.parametrize(
    ("at_step_2", "returncode", "last_line"),
    [
        ("raise ValueError('mine')", 1, "ValueError: mine"),
        ("raise KeyboardInterrupt", -2, "KeyboardInterrupt"),
    ],
    ids=["error", "interrupt"],
)
def test_an_end_inside_a_drive(at_step_2, returncode, last_line):
    result = run(at_step_2)
    assert result.returncode == returncode
    assert result.stderr.splitlines()[-1] == last_line
    assert result.stderr.count("Traceback") == 1
    assert "Exception ignored" not in result.stderr
