"""Experiments with driver=vllm, run by the stand-in for vLLM in `tests/fake_vllm`."""

import json
from pathlib import Path

from cbexp.config import (
    CacheConfig,
    CompileConfig,
    DatasetConfig,
    DriverConfig,
    ExperimentConfig,
    ModelConfig,
    SamplingConfig,
    TrackingConfig,
)
from cbexp.dataset.prompts import load_prompts
from cbexp.factory import build_driver
from cbexp.model.loading import describe_model
from cbexp.planning.plan import build_plan
from tests.model_fixtures import QWEN3

FAKE = Path(__file__).with_name("fake_vllm")


class FakeVllm:
    """Builds experiments and drivers on the stand-in; `notes` are what that was given and did."""

    def __init__(self, monkeypatch, tmp_path):
        self.tmp_path = tmp_path
        self.log_path = tmp_path / "vllm.log"
        self.drivers = []
        monkeypatch.setenv("FAKE_VLLM", str(tmp_path))

    def misbehave(self, words):
        (self.tmp_path / "orders.txt").write_text(words)

    def notes(self, kind):
        path = self.tmp_path / "notes.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [value for noted, value in map(json.loads, lines) if noted == kind]

    def experiment(self, driver=None, cache=None, num_generations=1, compile_mode="auto", **sampling):
        workload = {"num_prompts": 4, "min_length": 5, "max_length": 12, "num_generations": num_generations}
        return ExperimentConfig(
            model=ModelConfig(name="test", init="random", architecture=QWEN3, device="cpu"),
            dataset=DatasetConfig(kind="synthetic", name="synthetic", **workload),
            sampling=SamplingConfig(**({"max_new_tokens": 8, "ignore_eos": True} | sampling)),
            cache=CacheConfig(**(cache or {})),
            compile=CompileConfig(mode=compile_mode, cache_dir=str(self.tmp_path / "compile")),
            driver=DriverConfig(**({"name": "vllm", "pythonpath": str(FAKE)} | (driver or {}))),
            tracking=TrackingConfig(mode="disabled"),
            num_warmup_rounds=1,
            num_rounds=2,
        )

    def build(self, on_progress=lambda _: None, config=None, tokenizer=None, **changes):
        """A driver, and the prompts of its workload."""
        config = config or self.experiment(**changes)
        prompts = load_prompts(config.dataset, tokenizer, QWEN3["vocab_size"], config.seed, ())
        plan, model, eos = build_plan(config), describe_model(config.model), config.sampling.eos_token_ids
        texts = {"log_path": self.log_path, "on_progress": on_progress, "tokenizer": tokenizer}
        self.drivers.append(build_driver(plan, model, prompts, tuple(eos or ()), 0, **texts))
        return self.drivers[-1], [list(ids) for ids in prompts.prompt_ids]


def complete(prompt_ids, num_tokens):
    """What the stand-in answers."""
    return tuple((sum(prompt_ids) + place) % 97 for place in range(num_tokens))
