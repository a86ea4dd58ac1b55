"""Trains by GRPO: TRL's trainer with the engine's rollouts, rewards from the dataset's verifier.

    python scripts/grpo.py                                       # the embedded half-trained model, minutes on a CPU
    python scripts/grpo.py shuffle_rewards=true                  # the control: rewards that mean nothing
    python scripts/grpo.py adapter=lora trainer.learning_rate=3e-3
    python scripts/grpo.py trainer.resume_from_checkpoint=outputs/grpo/RUN/checkpoint-120
    python scripts/grpo.py model=qwen3_0_6b dataset=gsm8k dataset.split=train sampling.max_new_tokens=512

Settings are those of `cbexp` by group (model, adapter, dataset, sampling, cache, compile, tracking), and under
`trainer` those of TRL's `GRPOConfig`. The folder outputs/grpo/RUN gets checkpoints, `accuracy.json` and the curve in
`curve.png`; W&B the same, with all of TRL's metrics. Needs the extras trl and plot.
"""

from __future__ import annotations

import dataclasses
import json
import random
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import hydra
import torch
from datasets import Dataset
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from omegaconf import MISSING, DictConfig, OmegaConf
from peft import LoraConfig, PeftModel
from trl.trainer.grpo_config import GRPOConfig

from cbexp.checks import check_at_least, describe_near_matches
from cbexp.config import AdapterConfig, DatasetConfig, ExperimentConfig, ModelConfig, TrackingConfig
from cbexp.config.engine import CacheConfig, CompileConfig
from cbexp.config.workload import SamplingConfig
from cbexp.dataset.arithmetic import build_questions
from cbexp.dataset.chat import PromptRenderer
from cbexp.dataset.rows import Row, load_rows
from cbexp.dataset.verifiers import ANSWER_CHECKS, Verifier
from cbexp.engine import CBSyncConfig, EngineError, Sampling
from cbexp.errors import CbexpError, ConfigError
from cbexp.model.architecture import model_source
from cbexp.model.loading import load_model, load_tokenizer
from cbexp.planning.plan import RunPlan, resolve_plan
from cbexp.tracking.modes import choose_mode
from cbexp.trl import CBGRPOTrainer
from cbexp.trl.settings import GENERATION_KWARGS

CONF_DIR = Path(__file__).resolve().parents[1] / "conf"
EVALUATION_SEED = 0  # of the arithmetic questions, the same for every run
SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")  # names here and there
UNUSED_SAMPLING = (
    "ignore_eos",
    "eos_token_ids",
    "pad_token_id",
    "stop_token_ids",
    "max_new_tokens_file",
    "median_new_tokens",
)
# Arguments of the trainer that follow from the groups.
SET_BY_GROUPS = {
    **{name: f"sampling.{name}" for name in SAMPLING},
    "generation_kwargs": "sampling",
    "output_dir": "hydra.run.dir",
    "seed": "seed",
    "num_generations": "dataset.num_generations",
    "max_completion_length": "sampling.max_new_tokens",
    "chat_template_kwargs": "dataset.chat_template_kwargs",
    "report_to": "tracking",
    "run_name": "name",
    "use_cpu": "model.device",
}


@dataclass
class GRPORun:
    """A training run. `num_eval_prompts` questions, none of which is trained on, are answered greedily every while.

    `dataset.num_prompts` counts the questions to train on. `correction`: as in `CBGRPOTrainer`. `shuffle_rewards`
    permutes a batch's rewards: what a model learns then, it has not learnt from them.
    """

    model: ModelConfig = field(default_factory=lambda: ModelConfig(name="tiny", name_or_path="builtin:tiny"))
    adapter: AdapterConfig = field(default_factory=AdapterConfig)
    dataset: DatasetConfig = field(default_factory=DatasetConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    compile: CompileConfig = field(default_factory=CompileConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    name: str = "grpo"
    seed: int = 0
    num_eval_prompts: int = 300
    correction: bool = False
    shuffle_rewards: bool = False
    trainer: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_at_least("num_eval_prompts", self.num_eval_prompts, 1)
        if self.dataset.verifier == "none":
            raise ConfigError(f"dataset={self.dataset.name} has no verifier, and rewards come from one.")
        if self.sampling.temperature == 0:
            raise ConfigError("sampling.temperature=0 makes equal completions, which teach nothing: sample.")
        for name in UNUSED_SAMPLING:
            if getattr(self.sampling, name):
                raise ConfigError(f"sampling.{name} has no effect on TRL's trainer: leave it out.")
        if self.adapter.merged:
            raise ConfigError("adapter.merged=true leaves no adapter to train: use adapter=lora.")
        known = [item.name for item in dataclasses.fields(GRPOConfig)]
        for key in self.trainer:
            if key in SET_BY_GROUPS:
                raise ConfigError(f"trainer.{key} follows from {SET_BY_GROUPS[key]}: set that.")
            if key not in known:
                raise ConfigError(
                    f"trainer.{key} is no argument of TRL's GRPOConfig.{describe_near_matches(key, known)}"
                )

    def as_experiment(self) -> ExperimentConfig:
        """The groups as the rest of cbexp takes them."""
        names = ("model", "adapter", "dataset", "sampling", "cache", "compile", "tracking", "name", "seed")
        return ExperimentConfig(**{name: getattr(self, name) for name in names})


def register_schema() -> None:
    """What a model or dataset yaml must say itself is left open."""
    schema = OmegaConf.structured(GRPORun)
    schema.model.name = schema.dataset.name = MISSING
    schema.model.name_or_path = None
    OmegaConf.set_struct(schema.trainer, False)  # any argument may be added; the run knows their names
    ConfigStore.instance().store(name="grpo_schema", node=schema)


class Trainer(CBGRPOTrainer):
    """Evaluates by the share of `eval_dataset` that greedy decoding answers correctly."""

    verify: Verifier

    def evaluate(
        self,
        eval_dataset: Any = None,
        ignore_keys: list[str] | None = None,  # noqa: ARG002 - the signature is the trainer's
        metric_key_prefix: str = "eval",
    ) -> dict[str, float]:
        rows: Any = self.eval_dataset if eval_dataset is None else eval_dataset
        tokenizer: Any = self.processing_class
        self.model.eval()
        prompt_ids, _, _ = self._tokenize_prompts(list(rows["prompt"]))
        self.driver.add_requests(
            prompt_ids, max_new_tokens=self.args.max_completion_length, sampling=Sampling()
        )
        completions = self.driver.drive_until_empty().values()
        texts = tokenizer.batch_decode([list(each) for each in completions], skip_special_tokens=True)
        verdicts = [self.verify(text, answer) for text, answer in zip(texts, rows["answer"], strict=True)]
        metrics = {f"{metric_key_prefix}_accuracy": sum(verdicts) / len(verdicts)}
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics


def load_questions(config: GRPORun) -> tuple[list[Row], list[Row]]:
    """Rows to train on and rows to evaluate on, with no question in both."""
    dataset, num_eval = config.dataset, config.num_eval_prompts
    if dataset.kind == "arithmetic":
        questions = build_questions(dataset.num_prompts, config.seed, "train")
        rows = [Row(f"question {i}", each.text, each.answer) for i, each in enumerate(questions)]
        return rows, load_rows(replace(dataset, num_prompts=num_eval), EVALUATION_SEED)
    rows = load_rows(replace(dataset, num_prompts=dataset.num_prompts + num_eval), config.seed)
    return rows[num_eval:], rows[:num_eval]


def build_dataset(rows: Sequence[Row], renderer: PromptRenderer, verifier: str) -> Dataset:
    normalize = ANSWER_CHECKS[verifier].normalize
    return Dataset.from_dict(
        {
            "prompt": [renderer.read_messages(row) for row in rows],
            "answer": [normalize(str(row.answer)) for row in rows],
        }
    )


def build_arguments(config: GRPORun, plan: RunPlan, folder: Path, report_to: list[str]) -> GRPOConfig:
    on_cpu = plan.device.type == "cpu"
    given: dict[str, Any] = {
        "output_dir": str(folder),
        "seed": config.seed,
        "num_generations": config.dataset.num_generations,
        **{name: getattr(config.sampling, name) for name in SAMPLING},
        "generation_kwargs": {
            name: value for name, own in GENERATION_KWARGS.items() if (value := getattr(config.sampling, own))
        },
        "max_completion_length": plan.max_new_tokens,
        "chat_template_kwargs": config.dataset.chat_template_kwargs or None,
        "report_to": report_to,
        "run_name": config.name,
        "use_cpu": on_cpu,
        "bf16": not on_cpu,
        "eval_strategy": "steps",
        "eval_on_start": True,
    }
    return GRPOConfig(**given | config.trainer)


def build_engine_config(config: GRPORun, plan: RunPlan) -> CBSyncConfig:
    """The engine's settings of the groups, but for what the trainer decides."""
    decided = ("max_new_tokens", "eos_token_id", "pad_token_id", "sampling", "seed", "logprobs")
    defaults = {name: getattr(CBSyncConfig, name) for name in decided}
    num_tokens = config.cache.num_tokens
    num_blocks = None if num_tokens is None else -(-num_tokens // plan.page_size)
    return replace(
        plan.settings,
        max_requests_per_batch=config.cache.max_requests_per_batch,
        num_blocks=num_blocks,
        **defaults,
    )


def choose_model(config: GRPORun, arguments: GRPOConfig) -> tuple[Any, LoraConfig | None]:
    """The model, and the adapter that TRL is to make: a path, which TRL loads in float32, unless more is asked for."""
    model, adapter = config.model, config.adapter
    fresh_lora = None
    if adapter.kind == "lora" and adapter.path is None:
        fresh_lora = LoraConfig(
            r=adapter.rank,
            lora_alpha=adapter.alpha,
            target_modules=list(adapter.target_modules),
            task_type="CAUSAL_LM",
        )
    if model.init == "pretrained" and model.dtype == "auto" and adapter.path is None:
        source = model_source(model)
        if source.revision is not None:
            arguments.model_init_kwargs = {"revision": source.revision}
        return str(source.name), fresh_lora
    loaded = load_model(model, AdapterConfig(), config.seed).model
    if adapter.path is not None:
        loaded = PeftModel.from_pretrained(loaded, adapter.path, revision=adapter.revision, is_trainable=True)
    return loaded, fresh_lora


def build_reward(verify: Verifier, shuffle: bool, seed: int) -> Any:
    rng = random.Random(seed)

    def reward(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
        rewards = [
            float(verify(messages[-1]["content"], right))
            for messages, right in zip(completions, answer, strict=True)
        ]
        if shuffle:
            rng.shuffle(rewards)
        return rewards

    return reward


def start_tracking(config: GRPORun, folder: Path) -> list[str]:
    """Start the run of W&B that TRL's own callback then logs to; returns what the trainer reports to."""
    tracking = config.tracking
    if tracking.mode == "disabled" or (choice := choose_mode(tracking)).mode == "disabled":
        return []
    import wandb

    wandb.init(
        mode=choice.mode,
        project=tracking.project,
        entity=tracking.entity,
        group=tracking.group,
        tags=tracking.tags,
        name=f"{config.name}-{config.seed}",
        dir=str(folder),
        config={"cbexp": dataclasses.asdict(config)},
        settings=wandb.Settings(silent=True, console="off"),
    )
    return ["wandb"]


def write_curve(history: Sequence[Mapping[str, Any]], folder: Path) -> list[dict[str, Any]]:
    """Write the accuracies as `accuracy.json` and, with the mean rewards, as `curve.png`."""
    by_step = {entry["step"]: entry["eval_accuracy"] for entry in history if "eval_accuracy" in entry}
    accuracies = [{"step": step, "accuracy": value} for step, value in by_step.items()]
    (folder / "accuracy.json").write_text(json.dumps(accuracies, indent=2) + "\n")
    rewards = [(entry["step"], entry["reward"]) for entry in history if "reward" in entry]
    try:
        import matplotlib
    except ImportError:
        warnings.warn("no curve is drawn without matplotlib: pip install 'cbexp[plot]'", stacklevel=2)
        return accuracies
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(7, 4), layout="constrained")
    axis.plot([*by_step], [*by_step.values()], marker="o", label="held-out questions, greedy")
    axis.plot(*zip(*rewards, strict=True), alpha=0.6, label="training questions, sampled")
    axis.set(xlabel="optimizer step", ylabel="share of right answers", ylim=(0, 1))
    axis.grid(alpha=0.3)
    axis.legend()
    figure.savefig(folder / "curve.png", dpi=150)
    pyplot.close(figure)
    return accuracies


def finish_tracking(folder: Path) -> None:
    """Add the picture to the run of W&B, and end it."""
    import wandb

    picture = folder / "curve.png"
    if wandb.run is not None and picture.exists():
        wandb.run.log({"curve": wandb.Image(str(picture))})
    wandb.finish()


def train(config: GRPORun, folder: Path) -> list[dict[str, Any]]:
    """Train, and return the accuracies by step."""
    plan = resolve_plan(config.as_experiment())
    for warning in plan.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    if config.model.num_threads is not None:
        torch.set_num_threads(config.model.num_threads)
    folder.mkdir(parents=True, exist_ok=True)
    report_to = start_tracking(config, folder)
    arguments = build_arguments(config, plan, folder, report_to)
    tokenizer = load_tokenizer(config.model)
    renderer = PromptRenderer(config.dataset, tokenizer)
    if config.dataset.chat_template is not None:
        tokenizer.chat_template = Path(config.dataset.chat_template).expanduser().read_text(encoding="utf-8")
    verifier = config.dataset.verifier
    rows, eval_rows = load_questions(config)
    verify = ANSWER_CHECKS[verifier].verify
    model, fresh_lora = choose_model(config, arguments)
    trainer = Trainer(
        model,
        build_reward(verify, config.shuffle_rewards, config.seed),
        arguments,
        train_dataset=build_dataset(rows, renderer, verifier),
        eval_dataset=build_dataset(eval_rows, renderer, verifier),
        processing_class=tokenizer,
        peft_config=fresh_lora,
        engine_config=build_engine_config(config, plan),
        correction=config.correction,
    )
    trainer.verify = verify
    trainer.train(resume_from_checkpoint=arguments.resume_from_checkpoint)
    accuracies = write_curve(trainer.state.log_history, folder)
    if report_to:
        finish_tracking(folder)
    return accuracies


@hydra.main(version_base="1.3", config_path=str(CONF_DIR), config_name="grpo")
def main(settings: DictConfig) -> None:
    folder = Path(HydraConfig.get().runtime.output_dir)
    try:
        config: Any = OmegaConf.to_object(settings)
        accuracies = train(config, folder)
    except (CbexpError, EngineError) as error:
        sys.exit(f"error: {error}")
    first, last = accuracies[0], accuracies[-1]
    print(
        f"held-out accuracy {first['accuracy']:.3f} -> {last['accuracy']:.3f} after {last['step']} steps: {folder}"
    )


if __name__ == "__main__":
    register_schema()
    main()
