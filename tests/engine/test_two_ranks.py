"""Two processes of one trainer, as accelerate launches them: each rank drives its own prompts on its own replica."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import cbexp
from tests.engine import rank_of_two
from tests.engine.driving import drive
from tests.engine.forward.models import build, in_half_precision

# Without GPUs accelerate's own launcher starts one process alone; scripts find the same environment in both.
LAUNCHERS = {
    "cpu": ["torch.distributed.run", "--standalone", "--nproc-per-node=2"],
    "cuda": ["accelerate.commands.launch", "--multi_gpu", "--num_processes=2", "--mixed_precision=bf16"],
}


@pytest.mark.parametrize(
    "device",
    [pytest.param("cpu", marks=pytest.mark.slow), pytest.param("cuda", marks=pytest.mark.gpu)],
)
def test_a_driver_on_each_of_two_ranks(make_driver, tmp_path, device):
    """No collective runs inside a drive; after training both ranks have the same weights, and roll them out."""
    if device == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("two GPUs")
    script = [rank_of_two.__file__, str(tmp_path)]
    environment = os.environ | {
        "PYTHONPATH": str(Path(cbexp.__file__).parent.parent),
        "ACCELERATE_USE_CPU": str(device == "cpu").lower(),
        "OMP_NUM_THREADS": "1",
    }
    subprocess.run(
        [sys.executable, "-m", *LAUNCHERS[device], *script], env=environment, check=True, timeout=240
    )
    ranks = [torch.load(tmp_path / f"{rank}.pt", weights_only=False) for rank in range(2)]
    assert all(rank["resolved"]["dtype"] == "bfloat16" for rank in ranks)
    for name, weight in ranks[0]["weights"].items():
        assert torch.equal(weight, ranks[1]["weights"][name])
    assert ranks[0]["num_changed"] == ranks[1]["num_changed"] > 0
    model = build()
    model.load_state_dict(ranks[0]["weights"])
    driver = make_driver(in_half_precision(model).to(device), **rank_of_two.SETTINGS)
    for index, rank in enumerate(ranks):
        rollouts, num_rounds = rank["rollouts"], rank_of_two.NUM_ROUNDS[index]
        assert len(rollouts) == num_rounds * rank_of_two.NUM_STEPS + 1
        assert rollouts[0] != rollouts[-1]
        assert rollouts[:num_rounds] == rollouts[:1] * num_rounds
        limit = rank_of_two.LENGTHS[index]
        assert drive(driver, rank_of_two.PROMPTS[index], max_new_tokens=limit) == rollouts[-1]
