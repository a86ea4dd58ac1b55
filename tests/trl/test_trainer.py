"""`CBGRPOTrainer`: what it asks the driver for, how completions come back, and what TRL makes of them."""

import math
import warnings
from pathlib import Path

import pytest
import torch
from peft import LoraConfig

from cbexp.engine import EngineError
from tests.trl.trainers import EOS, PAD, TINY, build_dataset, load_tokenizer, reward_letters, reward_nothing

A, B, C = [1, 2], [3], [4, 5, 6]


def turn(trainer, prompts, num_generations=4):
    return trainer._generate_single_turn(prompts, None, {}, num_generations)


def generate_and_score(trainer):
    """The first batch of training, as the loss gets it."""
    trainer.model.train()
    return trainer._generate_and_score_completions(next(iter(trainer.get_train_dataloader())))


def test_a_training_step_with_the_correction(build_trainer):
    """End to end on the engine: its log-probabilities are those that TRL computes, so that nothing is corrected."""
    settings = {"max_steps": 2, "max_completion_length": 32, "temperature": 1.5}
    trainer = build_trainer(
        settings, reward_funcs=reward_letters, correction=True, num_rescored=3, sleep=True
    )
    before = {name: value.clone() for name, value in trainer.model.named_parameters()}
    trainer.train()
    log = trainer.state.log_history[1]
    assert log["sampling/sampling_logp_difference/max"] < 1e-4
    assert log["sampling/importance_sampling_ratio/min"] == pytest.approx(1, abs=1e-3)
    assert log["rollout/tokens_per_s"] * log["rollout/generation_s"] == pytest.approx(
        8 * log["completions/mean_length"], rel=1e-3
    )
    assert log["rollout/memory_gib"] > 0
    assert 0 <= log["rollout/kl"] < 1e-6
    assert log["rollout/fallback_steps"] == 0
    assert any(not torch.equal(value, before[name]) for name, value in trainer.model.named_parameters())


@pytest.mark.parametrize(
    ("prompts", "calls"),
    [
        ([A, A, A, A, B, B, B, B], [(2, 4)]),
        ([A, A, A, B, B, B, B, C], [(1, 3), (1, 4), (1, 1)]),  # a rank's part of three groups
        ([A, B, C], [(3, 1)]),
        ([A, B, A, A], [(2, 1), (1, 2)]),
    ],
)
def test_adjacent_equal_prompts_are_one_group_whatever_the_trainer_says(
    build_trainer, fake_driver, prompts, calls
):
    fake_driver.answer = staticmethod(lambda ids, index: {"completion_ids": (*ids, index, EOS)})
    trainer = build_trainer()
    ids, logprobs = turn(trainer, prompts)
    assert ids == [[*prompt, index, EOS] for index, prompt in enumerate(prompts)]
    assert logprobs is None  # the correction is off
    assert [call[:2] for call in trainer.driver.calls] == calls
    assert trainer.driver.config.seed == trainer.args.seed


def test_a_turn_is_limited_by_the_trainer_and_by_what_the_model_has_left(build_trainer, fake_driver):
    trainer = build_trainer()
    turn(trainer, [A, [1] * 1000, [1] * 1024])
    assert trainer.driver.calls == [(3, 1, [64, 24, 1])]


def test_the_driver_learns_of_every_optimizer_step(build_trainer, fake_driver):
    trainer = build_trainer({"max_steps": 3, "num_iterations": 2}, reward_funcs=reward_nothing)
    trainer.train()
    assert trainer.driver.versions == [0, 2, 3]


def test_images_and_failed_requests_are_refused_by_name(build_trainer, fake_driver):
    trainer = build_trainer()
    for images, fields, from_tools in [
        ([["a picture"]], {}, False),
        (None, {"pixel_values": 1}, False),
        (None, {}, True),
    ]:
        with pytest.raises(EngineError, match="images cannot be generated from"):
            trainer._generate_single_turn([A], images, fields, 1, has_tool_images=from_tools)
    failed = {"completion_ids": (), "finish_reason": "failed", "error": "its logits are not finite"}
    fake_driver.answer = staticmethod(lambda ids, index: failed if ids == B else {})
    with pytest.raises(EngineError, match="prompt 1 of 2 got no completion: its logits are not finite"):
        turn(trainer, [A, B])
    fake_driver.answer = staticmethod(lambda ids, index: {"completion_ids": (), "finish_reason": "length"})
    with pytest.raises(EngineError, match="prompt 0 of 1 got no completion"):
        turn(trainer, [A])


def test_eos_and_stop_strings_end_a_completion_and_the_limit_cuts_it(build_trainer, fake_driver):
    """Half end with EOS or a stop string; the others are masked as truncated."""
    ends = [
        {"completion_ids": (50, EOS), "finish_reason": "eos"},
        {"completion_ids": (50, 51, 10), "finish_reason": "stop", "stop_reason": "\n"},
        {"completion_ids": (50,) * 64, "finish_reason": "length"},
        {"completion_ids": (50, 51), "finish_reason": "length"},
    ]
    fake_driver.answer = staticmethod(lambda ids, index: ends[index % 4])
    trainer = build_trainer(
        {"mask_truncated_completions": True, "generation_kwargs": {"stop_strings": ["\n"]}},
        correction=True,
    )
    batch = generate_and_score(trainer)
    assert trainer._metrics["train"]["completions/clipped_ratio"] == [0.5]
    trained = (batch["completion_mask"] * batch["tool_mask"]).sum(1).tolist()
    assert trained == [2, 3, 0, 0] * 2
    row = batch["completion_ids"][1]
    assert row[:5].tolist() == [50, 51, 10, EOS, PAD]
    assert batch["sampling_per_token_logps"][1, :5].tolist() == [-0.5, -0.5, -0.5, 0, 0]
    assert torch.isfinite(batch["importance_sampling_ratio"]).all()


def test_log_probabilities_that_are_not_the_models_are_warned_of(build_trainer, fake_driver):
    trainer = build_trainer({"per_device_train_batch_size": 12}, num_rescored=5)
    with pytest.warns(
        UserWarning, match="differs from that of the model's own forward by a KL divergence of"
    ):
        generate_and_score(trainer)
    assert trainer._metrics["train"]["rollout/kl"][0] > 0.1
    assert trainer.driver.config.logprobs


@pytest.mark.parametrize("correction", [True, False])
def test_the_correction_weighs_by_the_difference_or_is_off(build_trainer, fake_driver, correction):
    trainer = build_trainer(
        {"vllm_importance_sampling_mode": "token_truncate", "vllm_importance_sampling_clip_max": 1.5},
        correction=correction,
    )
    batch = generate_and_score(trainer)
    assert ("importance_sampling_ratio" in batch) == correction
    assert any(name.startswith("sampling/") for name in trainer._metrics["train"]) == correction
    if correction:
        ratio = (batch["old_per_token_logps"] - batch["sampling_per_token_logps"]).exp()
        assert torch.equal(batch["importance_sampling_ratio"], ratio.clamp(max=1.5))


@pytest.mark.slow
@pytest.mark.parametrize("lora", [None, LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM")])
def test_a_path_is_trained_in_float32_under_autocast(build_trainer, lora):
    """TRL's default: the driver's copy of the weights is a bfloat16 one, which follows every optimizer step."""
    settings = {"max_steps": 2, "bf16": True, "max_completion_length": 32, "learning_rate": 1e-2}
    trainer = build_trainer(
        settings,
        model=str(TINY),
        reward_funcs=reward_letters,
        correction=True,
        num_rescored=4,
        peft_config=lora,
    )
    trainer.train()
    assert {value.dtype for value in trainer.model.parameters()} == {torch.float32}
    assert trainer.driver.resolved["dtype"] == "bfloat16"
    for log in trainer.state.log_history[:2]:
        assert log["sampling/sampling_logp_difference/mean"] < 0.02
        assert log["sampling/importance_sampling_ratio/min"] > 0.3
        assert 0 < log["rollout/kl"] < 0.005


@pytest.mark.slow
@pytest.mark.parametrize("correction", [True, False])
def test_log_probabilities_of_a_rollout_func_count_with_the_correction_alone(
    build_trainer, fake_driver, correction
):
    def rollout(prompts, trainer):
        prompt_ids = trainer.processing_class.apply_chat_template(
            prompts, add_generation_prompt=True, return_dict=False
        )
        completions = trainer.generate_completions(prompt_ids)
        return {
            "prompt_ids": prompt_ids,
            "completion_ids": [list(each.completion_ids) for each in completions],
            "logprobs": [list(each.logprobs_model) for each in completions],
        }

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # rollout_func is experimental, TRL says
        trainer = build_trainer(rollout_func=rollout, correction=correction)
    trainer.train()
    log = trainer.state.log_history[0]
    assert log["rollout/generation_s"] > 0
    assert ("sampling/importance_sampling_ratio/mean" in log) == correction


CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'


def with_tools(tokenizer):
    from trl.chat_template_utils import qwen3_chat_template

    tokenizer.chat_template = qwen3_chat_template
    return tokenizer


def call_a_tool_first(prompt_ids, index):
    has_answer = b"</tool_response>" in bytes(token_id for token_id in prompt_ids if token_id < 256)
    return {"completion_ids": (*(b"= 5" if has_answer else CALL.encode()), EOS)}


@pytest.mark.slow
@pytest.mark.parametrize("source", ["tools", "environment"])
def test_tools_and_environments_take_further_turns(build_trainer, fake_driver, source):
    class Adder:
        def __init__(self):
            self.sums = []

        def reset(self, **_):
            self.sums = []

        def add(self, a: int, b: int) -> int:
            """Add two numbers.

            Args:
                a: the one
                b: the other

            Returns:
                Their sum.
            """
            self.sums.append(a + b)
            return a + b

        def get_reward(self) -> float:
            return float(self.sums == [5])

    def add(a: int, b: int) -> int:
        """Add two numbers.

        Args:
            a: the one
            b: the other

        Returns:
            Their sum.
        """
        return a + b

    def reward_sums(completions, **_):
        return [float(messages[-1]["content"] == "= 5") for messages in completions]

    fake_driver.answer = staticmethod(call_a_tool_first)
    own = (
        {"tools": [add], "reward_funcs": reward_sums}
        if source == "tools"
        else {"environment_factory": Adder, "reward_funcs": None}
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # environments are experimental, TRL says
        trainer = build_trainer(
            {"max_completion_length": 250},
            processing_class=with_tools(load_tokenizer()),
            correction=True,
            **own,
        )
    trainer.train()
    log = trainer.state.log_history[0]
    assert log["reward"] == 1
    assert log["tools/call_frequency"] == 1
    assert log["tools/failure_frequency"] == 0
    assert math.isfinite(log["sampling/importance_sampling_ratio/mean"])
    assert [call[:2] for call in trainer.driver.calls] == [(2, 4), (2, 4)]


def test_tools_exclude_stop_strings(build_trainer, fake_driver):
    def add(a: int, b: int) -> int:
        """Add two numbers.

        Args:
            a: the one
            b: the other
        """
        return a + b

    with pytest.raises(EngineError, match=r"generation_kwargs\['stop_strings'\] does not work with tools"):
        build_trainer(
            {"generation_kwargs": {"stop_strings": ["\n"]}},
            processing_class=with_tools(load_tokenizer()),
            tools=[add],
        )


@pytest.mark.slow
def test_evaluation_generates_with_its_own_numbers(build_trainer, fake_driver):
    trainer = build_trainer(
        {"num_generations_eval": 2, "per_device_eval_batch_size": 4}, eval_dataset=build_dataset(6)
    )
    log = trainer.evaluate()
    assert [call[:2] for call in trainer.driver.calls] == [(2, 2)] * 3
    assert log["eval_rollout/generation_s"] > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "peft_config", [None, LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM")]
)
def test_a_run_that_is_resumed_makes_the_completions_that_would_have_come(build_trainer, peft_config):
    """And no two rollouts of a run are alike, nor those of two seeds."""

    def train(checkpoint=None, **more):
        trainer = build_trainer(settings | more, reward_funcs=reward_letters, peft_config=peft_config)
        rollouts, generate = [], trainer.generate_completions
        trainer.generate_completions = lambda ids: rollouts.append(generate(ids)) or rollouts[-1]
        trainer.train(resume_from_checkpoint=checkpoint)
        versions = [sorted({version for each in made for version, _ in each.versions}) for made in rollouts]
        return [[each.completion_ids for each in made] for made in rollouts], versions, trainer

    settings = {
        "max_steps": 3,
        "save_strategy": "steps",
        "save_steps": 2,
        "max_completion_length": 16,
        "temperature": 2.0,
    }
    whole, versions, trainer = train()
    assert versions == [[0], [1], [2]]
    rest, versions, _ = train(f"{trainer.args.output_dir}/checkpoint-2")
    assert rest == whole[2:]
    assert versions == [[2]]
    other, _, _ = train(seed=1, save_strategy="no")
    assert all(len(set(made)) > 2 for made in whole)
    assert not set(other[0]) & set(whole[0])


@pytest.mark.slow
def test_a_checkpoint_of_another_trainer_has_no_counter_and_this_is_said(build_trainer, fake_driver):
    settings = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1}
    trainer = build_trainer(settings, reward_funcs=reward_nothing)
    trainer.train()
    folder = Path(trainer.args.output_dir) / "checkpoint-1"
    (folder / "rollout_state_0.json").unlink()
    with pytest.warns(
        UserWarning, match=r"rollout_state_0\.json is missing: rollouts start from the first random"
    ):
        build_trainer(settings, reward_funcs=reward_nothing).train(resume_from_checkpoint=str(folder))


@pytest.mark.slow
def test_a_stop_string_ends_a_completion_of_the_engine(build_trainer):
    """A colon is in the first line of every answer."""
    trainer = build_trainer({"generation_kwargs": {"stop_strings": [":"]}}, correction=True)
    batch = generate_and_score(trainer)
    texts = trainer.processing_class.batch_decode(batch["completion_ids"], skip_special_tokens=True)
    assert all(text.endswith(":") and text.count(":") == 1 for text in texts)
    assert trainer._metrics["train"]["completions/clipped_ratio"] == [0]
    assert torch.equal(batch["tool_mask"].sum(1), batch["completion_mask"].sum(1) - 1)
    assert trainer._metrics["train"]["sampling/sampling_logp_difference/max"][0] < 1e-4
