"""One rank of a GRPO run: half of each group. Started by `test_two_ranks` with the folder for what it leaves behind."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

from cbexp.engine import Completion
from cbexp.trl import CBGRPOTrainer
from tests.trl.trainers import build_args, build_dataset, load_model, load_tokenizer, reward_letters


class Recording(CBGRPOTrainer):
    """Keeps what it has generated."""

    made: list[list[Completion]]

    def generate_completions(self, prompt_ids: Any) -> list[Completion]:
        self.made.append(super().generate_completions(prompt_ids))
        return self.made[-1]


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    settings = {
        "per_device_train_batch_size": 2,
        "num_generations": 4,
        "max_steps": 2,
        "max_completion_length": 16,
        "temperature": 2.0,
        "save_strategy": "steps",
        "save_steps": 2,
    }
    trainer = Recording(
        load_model(),
        reward_letters,
        build_args(folder / "run", **settings),
        train_dataset=build_dataset(),
        processing_class=load_tokenizer(),
        correction=True,
    )
    trainer.made = []
    trainer.train()
    found = {
        "prompts": [[each.prompt_ids for each in made] for made in trainer.made],
        "completions": [[each.completion_ids for each in made] for made in trainer.made],
        "log": trainer.state.log_history[:2],
        "weights": float(sum(value.detach().double().sum() for value in trainer.model.parameters())),
    }
    (folder / f"{trainer.args.process_index}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    sys.stdout.flush()
    os._exit(0)  # all is written; gloo sometimes waits for ever when an interpreter ends
