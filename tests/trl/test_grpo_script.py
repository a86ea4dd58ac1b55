"""`scripts/grpo.py`: what it refuses, what it trains on, and a run that is resumed, with LoRA and without."""

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from cbexp.config import AdapterConfig, DatasetConfig, ModelConfig
from cbexp.config.workload import SamplingConfig
from cbexp.engine import Sampling
from cbexp.errors import ConfigError
from cbexp.trl.settings import check_arguments, read_sampling

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "grpo.py"


@pytest.fixture(scope="module")
def grpo():
    spec = importlib.util.spec_from_file_location("grpo", SCRIPT)
    module = sys.modules["grpo"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    del sys.modules["grpo"]


def arithmetic(**settings):
    return DatasetConfig(name="arithmetic", kind="arithmetic", verifier="arithmetic", **settings)


def build_run(grpo, **settings):
    return grpo.GRPORun(**{"dataset": arithmetic(), "sampling": SamplingConfig(temperature=1.0)} | settings)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            {"trainer": {"learning_rat": 1}},
            "trainer.learning_rat is no argument of TRL's GRPOConfig. Did you mean",
        ),
        ({"trainer": {"num_generations": 4}}, "trainer.num_generations follows from dataset.num_generations"),
        ({"dataset": DatasetConfig()}, "dataset=arithmetic has no verifier"),
        (
            {"adapter": AdapterConfig(kind="lora", merged=True)},
            "adapter.merged=true leaves no adapter to train",
        ),
        ({"num_eval_prompts": 0}, "num_eval_prompts=0"),
        ({"sampling": SamplingConfig()}, "sampling.temperature=0 makes equal completions"),
        ({"sampling": SamplingConfig(temperature=1.0, ignore_eos=True)}, "sampling.ignore_eos has no effect"),
        ({"trainer": {"top_p": 0.9}}, "trainer.top_p follows from sampling.top_p"),
    ],
)
def test_what_makes_no_run_is_refused_by_name(grpo, settings, said):
    with pytest.raises(ConfigError, match=re.escape(said)):
        build_run(grpo, **settings)


def test_sampling_is_the_groups(grpo, tmp_path):
    sampling = SamplingConfig(temperature=0.7, top_k=20, stop_strings=["#"], suppress_token_ids=[3])
    run = build_run(
        grpo,
        dataset=arithmetic(num_generations=4),
        sampling=sampling,
        trainer={"per_device_train_batch_size": 4, "eval_strategy": "no", "eval_on_start": False},
    )
    plan = grpo.resolve_plan(run.as_experiment())
    arguments = grpo.build_arguments(run, plan, tmp_path, [])
    asked = read_sampling(arguments)
    assert asked == Sampling(temperature=0.7, top_k=20, stop_strings=["#"], suppress_token_ids=[3])
    check_arguments(arguments, grpo.build_engine_config(run, plan), correction=True)


def test_no_question_is_trained_on_and_measured_with(grpo, tmp_path):
    config = build_run(grpo, dataset=arithmetic(num_prompts=500))
    rows, measured = grpo.load_questions(config)
    assert (len(rows), len(measured)) == (500, 300)
    assert not {row.prompt for row in rows} & {row.prompt for row in measured}
    other_seed = grpo.load_questions(build_run(grpo, dataset=arithmetic(num_prompts=500), seed=1))
    assert [row.prompt for row in other_seed[1]] == [row.prompt for row in measured]
    assert [row.prompt for row in other_seed[0]] != [row.prompt for row in rows]

    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps({"question": f"{i}?", "answer": i}) + "\n" for i in range(12)))
    dataset = DatasetConfig(
        kind="jsonl",
        path=str(file),
        prompt_field="question",
        answer_field="answer",
        verifier="gsm8k",
        num_prompts=8,
    )
    rows, measured = grpo.load_questions(build_run(grpo, dataset=dataset, num_eval_prompts=4))
    assert len({row.prompt for row in rows} | {row.prompt for row in measured}) == 12


def test_shuffled_rewards_are_the_same_ones_in_another_order(grpo):
    texts = [[{"content": f"= {i % 3}"}] for i in range(64)]
    answers = ["1"] * 64
    verify = grpo.ANSWER_CHECKS["arithmetic"].verify
    rewards, shuffled = (
        grpo.build_reward(verify, shuffle, 0)(completions=texts, answer=answers) for shuffle in (False, True)
    )
    assert rewards == [float(i % 3 == 1) for i in range(64)]
    assert shuffled != rewards
    assert sorted(shuffled) == sorted(rewards)


def test_a_model_is_a_path_that_trl_loads_unless_it_cannot(grpo):
    tiny = ModelConfig(name="tiny", name_or_path="builtin:tiny_early")
    run = build_run(grpo, model=tiny, dataset=arithmetic(), adapter=AdapterConfig(kind="lora", rank=4))
    model, lora = grpo.choose_model(run, None)
    assert Path(model).name == "tiny_early"
    assert (lora.r, lora.inference_mode) == (4, False)
    tiny.dtype = "bfloat16"
    model, lora = grpo.choose_model(build_run(grpo, model=tiny, dataset=arithmetic()), None)
    assert (str(model.dtype), lora) == ("torch.bfloat16", None)


@pytest.mark.slow
@pytest.mark.parametrize("adapter", ["none", "lora"])
def test_a_run_leaves_its_curve_and_is_resumed(adapter, tmp_path):
    def run(folder, *overrides):
        settings = {
            "adapter": adapter,
            "dataset.num_prompts": 64,
            "num_eval_prompts": 16,
            "tracking": "offline",
            "trainer.max_steps": 4,
            "trainer.per_device_train_batch_size": 16,
            "trainer.steps_per_generation": 1,
            "trainer.eval_steps": 2,
            "trainer.save_steps": 2,
            "trainer.logging_steps": 1,
            "hydra.run.dir": folder,
        }
        words = [f"{name}={value}" for name, value in settings.items()]
        done = subprocess.run(
            [sys.executable, SCRIPT, *words, *overrides], capture_output=True, text=True, cwd=tmp_path
        )
        assert done.returncode == 0, done.stderr
        assert "held-out accuracy" in done.stdout
        state = json.loads((folder / "checkpoint-4/trainer_state.json").read_text())
        rewards = {entry["step"]: entry["reward"] for entry in state["log_history"] if "reward" in entry}
        return json.loads((folder / "accuracy.json").read_text()), rewards

    accuracies, rewards = run(tmp_path / "whole")
    assert [entry["step"] for entry in accuracies] == [0, 2, 4]
    assert list(rewards) == [1, 2, 3, 4]
    assert (tmp_path / "whole/curve.png").stat().st_size > 1000
    assert list((tmp_path / "whole/wandb").glob("offline-run-*/*.wandb"))
    resumed = run(tmp_path / "resumed", f"trainer.resume_from_checkpoint={tmp_path}/whole/checkpoint-2")
    assert resumed == (accuracies, rewards)
