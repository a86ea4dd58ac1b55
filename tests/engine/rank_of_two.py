"""One rank of a trainer under accelerate: a driver of its own, optimizer steps with the other rank in between.

Started by `test_two_ranks`, with the folder for what it leaves behind.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import accelerate
import torch
from torch import distributed

from cbexp.engine import CBSyncConfig, SyncCBDriver
from tests.engine.driving import drive
from tests.engine.forward.models import build

NUM_STEPS = 3
# They end at different times: after one round, and after three of more and longer requests.
PROMPTS = {0: [[5, 6, 7]], 1: [[9], list(range(40)), [3, 1, 4, 1]]}
NUM_ROUNDS = {0: 1, 1: 3}
LENGTHS = {0: 4, 1: 40}
SETTINGS = {"page_size": 8, "max_batch_tokens": 256}


def wait_for(path: Path) -> None:
    while not path.exists():
        time.sleep(0.01)


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    accelerator = accelerate.Accelerator(mixed_precision="bf16")
    rank = accelerator.process_index
    model = build().train()
    first = [parameter.detach().clone() for parameter in model.parameters()]
    wrapped, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    driver = SyncCBDriver(wrapped, config=CBSyncConfig(max_new_tokens=LENGTHS[rank], **SETTINGS))
    rollouts = []
    for step in range(NUM_STEPS):
        # One after the other: a collective inside a drive would wait for ever.
        if rank == 1:
            wait_for(folder / f"0 has driven {step}")
        rollouts += [drive(driver, PROMPTS[rank]) for _ in range(NUM_ROUNDS[rank])]
        (folder / f"{rank} has driven {step}").touch()
        tokens = torch.tensor([[*PROMPTS[rank][0], *rollouts[-1][0]]], device=accelerator.device)
        accelerator.backward(wrapped(input_ids=tokens, labels=tokens).loss)
        optimizer.step()
        optimizer.zero_grad()
    rollouts.append(drive(driver, PROMPTS[rank]))
    found = {
        "weights": {name: tensor.cpu() for name, tensor in model.state_dict().items()},
        "rollouts": rollouts,
        "resolved": driver.resolved,
        "num_changed": sum(
            not torch.equal(a.to(b), b) for a, b in zip(first, model.parameters(), strict=True)
        ),
    }
    driver.close()
    torch.save(found, folder / f"{rank}.pt")
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
