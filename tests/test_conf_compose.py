"""Every shipped yaml composes and validates; overrides win in the documented order; architectures are the true ones."""

import operator
import random
from pathlib import Path
from typing import get_args

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from cbexp.cli.command_line import conf_dir
from cbexp.cli.composer import parse_arguments, register_job_folder
from cbexp.cli.preflight import check_command
from cbexp.config import (
    ExperimentConfig,
    find_idle_settings,
    register_schema,
)
from cbexp.dataset.completion_limits import load_completion_limits
from cbexp.dataset.synthetic import draw_lengths
from cbexp.drivers.registry import DRIVERS
from cbexp.engine.types import COMPILE_MODES, BatchShape
from cbexp.errors import ConfigError
from cbexp.sweep.cells import hash_config

CHOICES = sorted(
    (path.parent.name, path.stem) for path in conf_dir().glob("*/*.yaml") if path.parent.parent == conf_dir()
)
EXPERIMENTS = [choice for group, choice in CHOICES if group == "experiment"]
# What a choice cannot know: a user must say it.
NEEDS = {
    ("model", "hf"): ["model.name_or_path=org/name"],
    ("dataset", "jsonl"): ["dataset.path=rows.jsonl"],
    ("dataset", "synthetic_file"): ["dataset.lengths_file=lengths.txt"],
}
# What an experiment sweeps over that has all values there are.
SWEPT = {
    "compile_modes": ("compile.mode", ["auto", *COMPILE_MODES]),
    "temperatures": ("sampling.temperature", [0, 0.5, 1, 1.5, 2]),
    "batch_shapes": ("compile.batch_shape", [*get_args(BatchShape)]),
    "drivers": ("driver.name", [*DRIVERS]),
}
# Single runs, and how many new tokens a request may have.
SINGLE = {"smoke": 16, "rollout_32": 512, "rollout_32x8": 512, "rollout_32x8_sampled": 512}
SINGLE |= {"rollout_256": 512, "rollout_natural": 8192}
IDENTITIES = ("name", "kind", "mode")
# A choice that is another one with more settings.
OTHER_IDENTITY = {("adapter", "lora_merged"): "lora"}


@pytest.fixture(autouse=True)
def _registered():
    register_schema()
    register_job_folder()


def check(*arguments):
    return check_command(parse_arguments(arguments), conf_dir())


def compose(*overrides) -> ExperimentConfig:
    (job,) = check(*overrides).jobs
    return job.config


@pytest.mark.parametrize(("group", "choice"), [pair for pair in CHOICES if pair[0] != "experiment"])
def test_shipped_choice_has_its_name_and_leaves_nothing_idle(group, choice):
    config = compose(f"{group}={choice}", *NEEDS.get((group, choice), []))
    settings = getattr(config, group)
    identity = next(getattr(settings, key) for key in IDENTITIES if hasattr(settings, key))
    assert identity == OTHER_IDENTITY.get((group, choice), choice)
    assert find_idle_settings(config) == []
    if group == "model" and not choice.startswith("tiny"):
        assert (config.dataset.name, config.max_new_tokens) == ("dapo_math", 512)


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_shipped_experiment_has_its_name_leaves_nothing_idle_and_sweeps_one_setting_at_most(experiment):
    command = check(f"experiment={experiment}")
    assert command.is_multirun == (experiment not in SINGLE)
    for job in command.jobs:
        assert job.config.name == experiment
        assert find_idle_settings(job.config) == []
    first, *others = ([text for text in job.own_overrides if "=" in text][1:] for job in command.jobs)
    assert all(other == first for other in others)
    if experiment in SWEPT:
        key, values = SWEPT[experiment]
        assert [operator.attrgetter(key)(job.config) for job in command.jobs] == values


@pytest.mark.parametrize("model", ["tiny", "qwen3_4b"])
@pytest.mark.parametrize("experiment", SINGLE)
def test_experiment_wins_over_what_a_model_brings(model, experiment):
    config = compose(f"experiment={experiment}", f"model={model}")
    assert config.dataset.kind == "synthetic"
    assert config.model.name == model
    assert config.max_new_tokens == SINGLE[experiment]


def test_command_line_wins_over_model_and_experiment_in_any_order():
    own = ["dataset=gsm8k", "sampling.max_new_tokens=999"]
    config = compose("experiment=smoke", *own, "model=qwen3_4b")
    assert (config.dataset.name, config.max_new_tokens) == ("gsm8k", 999)
    assert config == compose("model=qwen3_4b", "experiment=smoke", *own)
    assert compose("model=qwen3_4b", "dataset=gsm8k").dataset.name == "gsm8k"


@pytest.mark.parametrize(
    ("experiment", "num_prompts", "num_tokens"), [("rollout_32", 32, 6168), ("rollout_256", 256, 51013)]
)
def test_rollout_workloads_have_their_known_size(experiment, num_prompts, num_tokens):
    config = compose(f"experiment={experiment}", "model=qwen3_4b", "model.init=random")
    dataset = config.dataset
    draw = random.Random(dataset.lengths_seed)
    lengths = [draw.randint(dataset.min_length, dataset.max_length) for _ in range(dataset.num_prompts)]
    assert (len(lengths), sum(lengths)) == (num_prompts, num_tokens)
    assert config.sampling.ignore_eos
    assert (config.cache.block_sharing, config.max_new_tokens) == ("off", 512)


def test_experiments_make_a_sweep_that_is_no_grid_but_for_those_that_are_sweeps():
    command = check("-m", "experiment=glob(rollout_32*)")
    assert [job.config.name for job in command.jobs] == ["rollout_32", "rollout_32x8", "rollout_32x8_sampled"]
    assert command.output_dir.parent == Path("outputs/default")
    with pytest.raises(ConfigError, match="experiment=drivers lists a sweep of its own"):
        check("-m", "experiment=rollout_32,drivers")
    sync = check("experiment=drivers").jobs[0]
    assert hash_config(sync.config) == command.jobs[0].cell_hash


def test_natural_rollouts_have_their_known_lengths():
    config = compose("experiment=rollout_natural", "model=qwen3_4b", "model.init=random")
    limits = load_completion_limits(config)
    assert (len(limits), sum(limits), max(limits), min(limits)) == (512, 514_238, 8192, 55)
    lengths = draw_lengths(config.dataset, config.seed)
    assert (min(lengths) >= 100, max(lengths) <= 300, len(lengths)) == (True, True, 512)
    assert config.sampling.ignore_eos
    assert config.cache.max_requests_per_batch == 256 < len(limits)


# Parameters counted over the published checkpoints' tensors, tied embeddings once.
@pytest.mark.parametrize(
    ("model", "num_parameters"),
    [
        ("qwen3_0_6b", 596_049_920),
        ("qwen3_4b", 4_022_468_096),
        ("qwen3_8b", 8_190_735_360),
        ("llama3_2_1b", 1_235_814_400),
    ],
)
def test_random_architecture_is_the_true_one(model, num_parameters):
    written = dict(compose(f"model={model}", "model.init=random").model.architecture)
    config = AutoConfig.for_model(written.pop("model_type"), **written)
    for key, value in written.items():
        assert getattr(config, key) == value
    with torch.device("meta"):
        built = AutoModelForCausalLM.from_config(config)
    assert sum(parameter.numel() for parameter in built.parameters()) == num_parameters
