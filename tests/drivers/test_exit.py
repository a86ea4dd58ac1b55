"""A script that forgets everything still ends by itself and leaves stderr empty."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

SCRIPT = """
import sys, time
import torch
torch.set_num_threads(1)
from transformers import Qwen3Config, Qwen3ForCausalLM
from cbexp.drivers.generate import GenerateDriver
from cbexp.drivers.manager import ManagerDriver
from cbexp.engine import CBSyncConfig

torch.manual_seed(0)
model = Qwen3ForCausalLM(Qwen3Config(vocab_size=97, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, head_dim=8))
config = CBSyncConfig(max_new_tokens=4, eos_token_id=(), pad_token_id=0, page_size=16, num_blocks=16,
    max_batch_tokens=64, allow_block_sharing=True)
drivers = [GenerateDriver(model, config), ManagerDriver(model, config), ManagerDriver(model, config)]
for driver in drivers:
    driver.add_requests([[1, 2], [3]], num_generations=2)
    print(len(driver.drive_until_empty()))
dropped = ManagerDriver(model, config)
dropped.warmup()
del dropped
"""
LEAVE = """
drivers[1].add_requests([[1, 2]])
print("end", flush=True)
sys.exit(3)
"""


def test_a_script_that_closes_no_driver_and_leaves_requests_queued():
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT + LEAVE],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=240,  # upstream's thread, not stopped, would keep the process for ever
    )
    assert (done.returncode, done.stdout.split(), done.stderr) == (3, ["4", "4", "4", "end"], "")
