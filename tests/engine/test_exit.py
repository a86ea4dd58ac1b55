"""However a process with a driver ends, its stderr shows what the user's own code raised and nothing else."""

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


@pytest.mark.parametrize(
    ("at_step_2", "returncode", "stdout", "last_line"),
    [
        ("pass", 0, "finished\n", None),
        pytest.param("raise ValueError('mine')", 1, "", "ValueError: mine", marks=pytest.mark.slow),
        ("raise KeyboardInterrupt", -2, "", "KeyboardInterrupt"),
    ],
    ids=["a forgotten close", "an error in a drive", "an interrupt in a drive"],
)
def test_a_driver_left_open_adds_nothing(at_step_2, returncode, stdout, last_line):
    command = [sys.executable, "-c", SCRIPT.format(at_step_2=at_step_2)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert (result.returncode, result.stdout) == (returncode, stdout)
    assert result.stderr.count("Traceback") == (last_line is not None)
    assert "Exception ignored" not in result.stderr
    assert result.stderr.splitlines()[-1:] == ([last_line] if last_line else [])
