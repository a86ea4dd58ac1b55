"""What a trainer on the embedded model takes, and a driver that answers as it is told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig

import cbexp
from cbexp.dataset.arithmetic import build_questions, verify_answer
from cbexp.engine import Completion, RequestTimings

TINY = Path(cbexp.__file__).parent / "assets" / "tiny_early"
EOS, PAD = 257, 258


def load_model(**kwargs: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32, **kwargs)


def load_tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(TINY)


def build_dataset(num_questions: int = 64) -> Dataset:
    questions = build_questions(num_questions, 0, "train")
    return Dataset.from_dict(
        {
            "prompt": [[{"role": "user", "content": question.text}] for question in questions],
            "answer": [question.answer for question in questions],
        }
    )


def reward_right_answers(completions: list[Any], answer: list[int], **_: Any) -> list[float]:
    return [
        float(verify_answer(text[0]["content"], right))
        for text, right in zip(completions, answer, strict=True)
    ]


def reward_letters(completions: list[Any], **_: Any) -> list[float]:
    """Another reward for almost every text."""
    return [float(sum(map(ord, text[0]["content"]))) for text in completions]


def reward_nothing(completions: list[Any], **_: Any) -> list[float]:
    return [0.0] * len(completions)


def build_args(folder: Path, **settings: Any) -> GRPOConfig:
    defaults = {
        "per_device_train_batch_size": 8,
        "num_generations": 4,
        "max_completion_length": 64,
        "max_steps": 1,
        "logging_steps": 1,
        "learning_rate": 1e-4,
        "bf16": False,
        "gradient_checkpointing": False,
        "use_cpu": True,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
    }
    return GRPOConfig(str(folder), **defaults | settings)


class FakeDriver:
    """Stands in for `SyncCBDriver`: `answer(prompt ids, index)` says how each request ends."""

    def __init__(self, model: Any, config: Any, tokenizer: Any) -> None:
        self.config, self.calls, self.versions, self.steps = config, [], [], []
        self._queue: list[list[int]] = []
        self._submissions = 0

    def weights_changed(self, version: int) -> None:
        self.versions.append(version)

    def add_requests(self, prompts: Any, *, num_generations: int, max_new_tokens: list[int]) -> list[str]:
        self.calls.append((len(prompts), num_generations, max_new_tokens))
        first = len(self._queue)
        self._queue += [list(ids) for ids in prompts for _ in range(num_generations)]
        self._submissions += 1
        return [f"request {i}" for i in range(first, len(self._queue))]

    def drive_until_empty(self) -> dict[str, Completion]:
        queue, self._queue = self._queue, []
        return {f"request {i}": self._complete(i, ids) for i, ids in enumerate(queue)}

    def state_dict(self) -> dict[str, int]:
        return {"submissions": self._submissions}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._submissions = state["submissions"]

    def _complete(self, index: int, prompt_ids: list[int]) -> Completion:
        values = {"completion_ids": (ord("="), EOS), "finish_reason": "eos"} | self.answer(prompt_ids, index)
        logprobs = tuple(-0.5 for _ in values["completion_ids"])
        return Completion(
            f"request {index}",
            tuple(prompt_ids),
            timings=RequestTimings(0.0),
            **{"logprobs_model": logprobs} | values,
        )

    @staticmethod
    def answer(prompt_ids: list[int], index: int) -> dict[str, Any]:
        return {}
