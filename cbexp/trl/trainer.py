"""The hook of TRL's `GRPOTrainer` through which it generates, and a trainer that has it."""

from __future__ import annotations

import json
import resource
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from trl.trainer.grpo_trainer import GRPOTrainer

from cbexp.engine import CBSyncConfig, Completion, EngineError, StepInfo, SyncCBDriver
from cbexp.engine.rescoring import Rescoring, rescore
from cbexp.engine.support import read_positions
from cbexp.trl.settings import build_engine_config, check_arguments

if TYPE_CHECKING:  # at run time the trainer comes after the mixin
    from trl.trainer.grpo_trainer import GRPOTrainer as _Base
else:
    _Base = object

STATE_FILE = "rollout_state_{rank}.json"


@dataclass
class _Rollout:
    """What the drives since a generation began have cost on this rank."""

    seconds: float = 0.0
    num_tokens: int = 0
    num_fallback_steps: int = 0
    sample: list[Completion] = field(default_factory=list)  # of the first drive, to be rescored


class CBRolloutMixin(_Base):
    """Generates with `SyncCBDriver` on the model that is trained; goes before `GRPOTrainer` among the bases.

    Takes what the trainer takes, and by name:

    `engine_config`: settings of the engine beyond what follows from `GRPOConfig` (None: CUDA graphs on a GPU, prompts
    shared by their generations).
    `correction`: hand the sampler's log-probabilities over, and turn on TRL's importance-sampling correction with all
    its `vllm_importance_sampling_*` settings and `sampling/*` metrics. It costs one forward more a generation.
    `num_rescored`: completions of each generation and rank whose log-probabilities are compared with those of the
    trainer's own forward, one forward each; a divergence beyond rounding is warned of. 0: none.
    `sleep`: have the driver sleep after each generation, so that the backward pass has the cache's memory.

    The completions of adjacent equal prompts are made together. EOS stays where the model made one. A completion that a
    stop string ends gets an EOS that is not trained on, so that TRL does not take it for truncated. One that the
    model's positions end is cut there, and counts as truncated.
    Random numbers follow from `GRPOConfig.seed` and the rank. Checkpoints keep where they are, so that a run that is
    resumed goes on with the completions that it would have made.

    Logged: `rollout/generation_s` (of the slowest rank), `rollout/tokens_per_s` (all ranks), `rollout/memory_gib` (in
    use on the device after the drive, or the process's peak on a CPU; the largest rank), `rollout/fallback_steps`
    (decode steps that ran as transformers' own, since the cache was full) and `rollout/kl` (in nats, of the rescored
    completions; the largest rank).

    Raises `EngineError` for settings without effect here and for images, besides what `SyncCBDriver` raises.
    """

    args: Any
    model: Any

    def __init__(
        self,
        model: Any,
        reward_funcs: Any = None,
        args: Any = None,
        *others: Any,
        engine_config: CBSyncConfig | None = None,
        correction: bool = False,
        num_rescored: int = 4,
        sleep: bool = False,
        **more: Any,
    ) -> None:
        if args is not None:
            check_arguments(args, engine_config, correction)
        super().__init__(model, reward_funcs, args, *others, **more)
        if self.tools and (self.args.generation_kwargs or {}).get("stop_strings"):
            raise EngineError(
                "GRPOConfig.generation_kwargs['stop_strings'] does not work with tools: TRL would train on the EOS "
                "that stands for the end. Remove one of them."
            )
        self._engine_config = engine_config
        self._correction = correction
        self._num_rescored = num_rescored
        self._sleep = sleep
        self._driver: SyncCBDriver | None = None
        self._policy_version: int | None = None
        self._rollout = _Rollout()
        self._padded_rows: list[int] = []
        if correction:
            # All that these two turn on from here: old log-probabilities, their ratio to the sampler's, its metrics,
            # and a synchronisation of weights, for which `_last_loaded_step` leaves no reason.
            self.use_vllm, self.vllm_mode = True, "server"

    @property
    def _last_loaded_step(self) -> int:  # type: ignore[override]
        """The step whose weights generate: it is always the last one."""
        step: int = self.state.global_step
        return step

    @property
    def driver(self) -> SyncCBDriver:
        """The engine on the trainer's model, built when it is first asked for; it knows of the last optimizer step."""
        if self._driver is None:
            config = build_engine_config(
                self.args,
                self._engine_config,
                self._correction or self._num_rescored > 0,
                self.eos_token_ids,
                self._tokenizer.pad_token_id,
                self.model,
            )
            self._driver = SyncCBDriver(self.model_wrapped, config=config, tokenizer=self._tokenizer)
        if self.state.global_step != self._policy_version:
            self._policy_version = self.state.global_step
            self._driver.weights_changed(self._policy_version)
        return self._driver

    def generate_completions(self, prompt_ids: Sequence[Sequence[int]]) -> list[Completion]:
        """One completion for each prompt, in order; equal prompts that are neighbours are read once.

        For a `rollout_func`, too. Raises `EngineError` when a request fails, naming its prompt.
        """
        driver, start_s = self.driver, time.perf_counter()
        request_ids: list[str] = []
        groups = [(list(ids), len(list(copies))) for ids, copies in groupby(prompt_ids)]
        for num_generations, alike in groupby(groups, key=lambda group: group[1]):
            prompts = [ids for ids, _ in alike]
            limits = [self._limit_for(len(ids)) for ids in prompts]
            request_ids += driver.add_requests(
                prompts, num_generations=num_generations, max_new_tokens=limits
            )
        results = driver.drive_until_empty()
        completions = [results[request_id] for request_id in request_ids]
        for index, completion in enumerate(completions):
            if completion.finish_reason == "failed" or not completion.completion_ids:
                raise EngineError(
                    f"prompt {index} of {len(completions)} got no completion: {completion.error}"
                )
        if self._num_rescored and not self._rollout.sample:
            spacing = -(-len(completions) // self._num_rescored)
            self._rollout.sample = completions[::spacing]
        self._rollout.seconds += time.perf_counter() - start_s
        self._rollout.num_tokens += sum(map(len, completions))
        self._rollout.num_fallback_steps += sum(map(_is_fallback, driver.steps))
        return completions

    def _limit_for(self, prompt_length: int) -> int:
        """TRL's limit, or what the model's positions leave, for a turn after long ones."""
        bounds = [self.max_completion_length]
        positions = read_positions(self.model.config).count
        if positions is not None:
            bounds.append(max(positions - prompt_length, 1))
        return min(bound for bound in bounds if bound is not None)

    def _generate_single_turn(
        self,
        prompt_ids: list[list[int]],
        images: Any,
        multimodal_fields: dict[str, Any],
        num_generations: int,  # noqa: ARG002 - a rank may have a part of a group: the prompts say what is one
        has_tool_images: bool = False,
    ) -> tuple[list[list[int]], list[list[float]] | None]:
        if images or has_tool_images or set(multimodal_fields) - {"token_type_ids"}:
            raise EngineError(
                "images cannot be generated from: the engine serves text models alone. Remove them from the dataset "
                "and from what the tools return."
            )
        completions = self.generate_completions(prompt_ids)
        completion_ids = [list(completion.completion_ids) for completion in completions]
        logprobs = [list(completion.logprobs_model) for completion in completions]
        self._padded_rows = [i for i, each in enumerate(completions) if isinstance(each.stop_reason, str)]
        for row in self._padded_rows:
            completion_ids[row].append(self.eos_token_ids[0])
            logprobs[row].append(0.0)
        return completion_ids, logprobs if self._correction else None

    def _generate(self, prompts: list[Any]) -> tuple[Any, ...]:
        self._rollout, self._padded_rows = _Rollout(), []
        outputs: tuple[Any, ...] = super()._generate(prompts)
        self._log_rollout()
        if self._sleep and self._driver is not None:
            self._driver.sleep()
        if not self._padded_rows:
            return outputs
        prompt_ids, completion_ids, tool_mask, *others = outputs
        tool_mask = tool_mask or [[1] * len(ids) for ids in completion_ids]
        for row in self._padded_rows:
            tool_mask[row][-1] = 0
        return (prompt_ids, completion_ids, tool_mask, *others)

    def _log_rollout(self) -> None:
        """Collective: every rank comes here once a generation, while tool turns may be more on one than on another."""
        mode, device = "train" if self.model.training else "eval", self.accelerator.device
        own = self._rollout
        memory_gib = _memory_bytes(device) / 2**30
        values = [own.seconds, own.num_tokens, own.num_fallback_steps, memory_gib, self._rescore(own.sample)]
        ranks = self.accelerator.gather(torch.tensor([values], dtype=torch.float32, device=device)).cpu()
        seconds, _, _, memory_gib, kl = ranks.amax(0).tolist()
        _, num_tokens, num_fallback_steps, *_ = ranks.sum(0).tolist()
        if not seconds:  # a rollout_func that generates by other means
            return
        logged = {
            "generation_s": seconds,
            "tokens_per_s": num_tokens / seconds,
            "memory_gib": memory_gib,
            "fallback_steps": num_fallback_steps,
            **({"kl": kl} if self._num_rescored else {}),
        }
        for name, value in logged.items():
            self._metrics[mode][f"rollout/{name}"].append(value)

    def _rescore(self, completions: Sequence[Completion]) -> float:
        """KL of the driver's distribution from that of the trainer's own forward, in nats; 0 without completions."""
        if not completions:
            return 0.0
        rescored = [
            rescore(
                self.model_wrapped,
                completion.request_id,
                completion.prompt_ids,
                completion.completion_ids,
                logprobs=completion.logprobs_model,
                temperature=self.temperature,
            )
            for completion in completions
        ]
        rescoring = Rescoring(rescored, is_greedy=False)
        problem = rescoring.find_problem()
        if problem is not None:
            warnings.warn(problem, stacklevel=2)
        return rescoring.figures["kl"]

    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(output_dir)
        if self._driver is not None:
            self._state_file(output_dir).write_text(json.dumps(self._driver.state_dict()))

    def _load_rng_state(self, checkpoint: str | None) -> None:
        super()._load_rng_state(checkpoint)
        if checkpoint is None:
            return
        file = self._state_file(checkpoint)
        if file.is_file():
            self.driver.load_state_dict(json.loads(file.read_text()))
        else:
            warnings.warn(
                f"{file} is missing: rollouts start from the first random numbers again.", stacklevel=2
            )

    def _state_file(self, checkpoint: str) -> Path:
        rank = self.args.process_index
        return Path(checkpoint) / STATE_FILE.format(rank=rank)


class CBGRPOTrainer(CBRolloutMixin, GRPOTrainer):
    """TRL's `GRPOTrainer` whose completions come from the engine: see `CBRolloutMixin` for what it takes more."""


def _is_fallback(step: StepInfo) -> bool:
    return step.kind != "prefill" and step.bucket is None


def _memory_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return total - free
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 2**10
