"""A script that forgets everything still ends by itself, at once, and leaves stderr empty."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

SCRIPT = """
import sys, time
import torch
torch.set_num_threads(1)
from transformers import Qwen3Config, Qwen3ForCausalLM
from cbexp.peers.base import PeerConfig
from cbexp.peers.generate import GenerateDriver
from cbexp.peers.manager import ManagerDriver

torch.manual_seed(0)
model = Qwen3ForCausalLM(Qwen3Config(vocab_size=97, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, head_dim=8))
config = PeerConfig(max_new_tokens=4, eos_token_ids=(), pad_token_id=0, compile_mode="auto", page_size=16,
    num_blocks=16, max_batch_tokens=64, max_requests_per_batch=None, allow_block_sharing=True, scheduler="fifo")
drivers = [GenerateDriver(model, config), ManagerDriver(model, config), ManagerDriver(model, config)]
for driver in drivers:
    driver.add_requests([[1, 2], [3]], num_generations=2)
    print(len(driver.drive_until_empty()))
dropped = ManagerDriver(model, config)
dropped.warmup()
del dropped
"""

FORGET = 'print("end", flush=True)'
LEAVE_WITH_WORK_QUEUED = """
drivers[1].add_requests([[1, 2]])
print("end", flush=True)
sys.exit(3)
"""


@pytest.mark.parametrize(("ending", "code"), [(FORGET, 0), (LEAVE_WITH_WORK_QUEUED, 3)])
def test_a_script_that_never_closes_its_drivers(ending, code):
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT + ending],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    lines = [process.stdout.readline().strip() for _ in range(4)]
    end_s = time.perf_counter()
    assert process.wait(timeout=30) == code
    # About 2 s of an idle machine; upstream's thread, not stopped, would keep the process for ever.
    assert time.perf_counter() - end_s < 20
    assert lines == ["4", "4", "4", "end"]
    assert process.stderr.read() == ""
    process.stdout.close()
    process.stderr.close()
