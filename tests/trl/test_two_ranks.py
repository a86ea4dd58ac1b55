"""Two processes of a GRPO run whose groups are split between them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import cbexp
from tests.trl import rank_of_two


@pytest.mark.slow
def test_a_group_is_split_between_two_ranks(tmp_path):
    environment = os.environ | {
        "PYTHONPATH": str(Path(cbexp.__file__).parent.parent),
        "ACCELERATE_USE_CPU": "true",
        "OMP_NUM_THREADS": "1",
    }
    command = [
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        rank_of_two.__file__,
        str(tmp_path),
    ]
    subprocess.run([sys.executable, "-m", *command], env=environment, check=True, timeout=120)
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert first["prompts"] == second["prompts"]
    for here, there in zip(first["completions"], second["completions"], strict=True):
        assert len({tuple(ids) for ids in here + there}) == 4
    assert first["weights"] == second["weights"]
    for log in first["log"]:  # the main process's, of both
        num_tokens = 4 * log["completions/mean_length"]
        assert log["rollout/tokens_per_s"] * log["rollout/generation_s"] == pytest.approx(
            num_tokens, rel=1e-3
        )
        assert log["sampling/sampling_logp_difference/max"] < 1e-4
    for rank in range(2):
        state = json.loads((tmp_path / f"run/checkpoint-2/rollout_state_{rank}.json").read_text())
        assert state == {"num_submissions": 2}
