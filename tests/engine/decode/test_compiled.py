"""Models' decode steps compiled on a CPU: tokens of `generate`, few programs, no copy of the cache, over training."""

from __future__ import annotations

import functools

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.profiler import ProfilerActivity, profile

from cbexp.engine import CBSyncConfig, EngineError, SyncCBDriver
from cbexp.engine.decode.runners import build_runner
from cbexp.engine.decode.self_check import check_bucket
from cbexp.engine.decode.step import EagerSteps
from cbexp.engine.forward import PlainForward
from cbexp.engine.operators import declare_operators
from tests.engine.decode_fixtures import build_buffers, build_decode_model, build_pools
from tests.engine.driving import cache_of, check_cache_at_rest, drive

NUM_NEW = 20
MAX_ROWS = 9
slow = pytest.mark.slow


def compile_steps(model, buffers, of=None):
    """A compiled runner of `of`, else of the model itself, and the forward of the model."""
    forward = PlainForward(model, buffers.layers)
    steps_of = forward if of is None else PlainForward(of, buffers.layers)
    return build_runner(steps_of, buffers, "default", parameters=list((of or model).parameters())), forward


# A check of each batch size is part of every drive below.
@slow
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-4), (torch.bfloat16, 0.2)], ids=str)
def test_compiled_steps_pass_the_self_check(dtype, bound):
    buffers = build_buffers(MAX_ROWS, pools=build_pools(30, dtype=dtype))
    runner, forward = compile_steps(build_decode_model().to(dtype), buffers)
    for bucket in (8, 1):
        runner.prepare(bucket)
        result = check_bucket(runner, forward, forward.logits, buffers, bucket=bucket, mode="default")
        assert 0 <= result.mean_logit_error <= result.max_logit_error < bound
        assert result.max_logprob_error == 0.0  # of the forward run eagerly, which is the reference here
    assert runner.stats.programs == 2
    runner.close()


@slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_self_check_finds_a_compiled_step_of_other_logits(dtype):
    """The forward run eagerly is right, and so are the tokens and the cache."""
    model, other = (build_decode_model().to(dtype) for _ in range(2))
    with torch.no_grad():
        other.lm_head.weight.mul_(0.8)
    buffers = build_buffers(MAX_ROWS, pools=build_pools(30, dtype=dtype))
    runner, forward = compile_steps(model, buffers, of=other)
    runner.prepare(8)
    with pytest.raises(EngineError, match="default, batch of 8 rows: the step's best logits differ by up to"):
        check_bucket(runner, forward, forward.logits, buffers, bucket=8, mode="default")
    runner.close()


def test_no_operator_is_new_to_the_compiler():
    """One that is new to torch 2.11 is described with all that it is computed from, which takes minutes."""
    declare_operators()
    from torch._inductor.lowering import FALLBACK_ALLOW_LIST

    operators = {name for name in torch._C._dispatch_get_all_op_names() if name.startswith("cbexp::")}
    assert {"cbexp::best_tokens", "cbexp::paged_decode_attention"} <= operators <= set(FALLBACK_ALLOW_LIST)


# Whole drives


def build_driver(model, **changes):
    """Two buckets, neither of which is a program of its own."""
    settings = {"compile_mode": "default", "fusion": "none", "max_new_tokens": NUM_NEW, "page_size": 8}
    settings |= {"num_blocks": 80, "buckets": (2, 4), "max_batch_tokens": 256}
    return SyncCBDriver(model, None, CBSyncConfig(**(settings | changes)))


def programs_and_recompiles(driver):
    stats = driver.compile_stats
    assert stats["graph_breaks"] == 0
    return stats["programs"], stats["recompiles"]


def largest_allocation(function):
    """Bytes of the largest piece of memory that a call takes at once, compiled or not."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        function()
    events = profiler.profiler.kineto_results.events()
    return max(event.nbytes() for event in events if event.name() == "[memory]")


def require_no_copy_of_the_cache(driver):
    cache = cache_of(driver).cache_tensor
    assert largest_allocation(cache.clone) >= cache.nbytes
    steps = functools.partial(driver.time_decode_steps, 4, 60, 4, num_bursts=1)
    steps()
    assert largest_allocation(steps) < cache.nbytes / 8


COMPILED_FAMILIES = {
    "gemma3": {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]},
    "gpt_oss": {"num_hidden_layers": 1},
    "qwen3_moe": {"num_hidden_layers": 1},
}


@pytest.mark.parametrize(
    "family", ["gemma3", *(pytest.param(family, marks=slow) for family in ("gpt_oss", "qwen3_moe"))]
)
def test_families_compile_whole_and_copy_no_cache(new_model, prompts, greedy, family):
    """Sliding and full layers share one allocation: to a compiler that saw it twice they would be aliases."""
    model = new_model(family, **COMPILED_FAMILIES[family])
    expected = [greedy(model, prompt, NUM_NEW) for prompt in prompts]
    with build_driver(model, num_blocks=4000) as driver:
        driver.warmup()
        for _ in range(2):
            assert drive(driver, prompts) == expected
        require_no_copy_of_the_cache(driver)
        assert programs_and_recompiles(driver) == (1, 0)


@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
def test_eager_steps_copy_no_cache_either(shared_model, make_driver, family):
    require_no_copy_of_the_cache(make_driver(shared_model(family), num_blocks=4000))


class Life:
    """A model and a driver with a crowded cache, chunked prompts, shared blocks and an EOS that some requests reach."""

    def __init__(self, model, prompts, greedy, mode):
        self.model, self.prompts, self._greedy = model, prompts, greedy
        self._limits = [30, 1, 17, 30, 30, 9, 25]
        tokens = greedy(model, prompts[4], 30)
        self.eos = next(token for token in tokens[8:] if token not in tokens[:8])
        self.driver = build_driver(
            model,
            compile_mode=mode,
            eos_token_id=self.eos,
            max_new_tokens=30,
            max_batch_tokens=24,
            num_blocks=14,
            allow_block_sharing=True,
            buckets=(2, 5),
        )

    def expected(self, num_generations=1):
        pairs = zip(self.prompts, self._limits, strict=True)
        completions = [self._greedy(self.model, prompt, limit, (self.eos,)) for prompt, limit in pairs]
        return [completion for completion in completions for _ in range(num_generations)]

    def drive(self, num_generations=1):
        return drive(self.driver, self.prompts, max_new_tokens=self._limits, num_generations=num_generations)

    def check_a_round(self, num_generations=1):
        assert self.drive(num_generations) == self.expected(num_generations)
        check_cache_at_rest(self.driver)


@pytest.fixture(scope="module", params=["default", pytest.param("max_autotune_no_cudagraphs", marks=slow)])
def life(request, new_model, prompts, greedy):
    life = Life(new_model("qwen3"), prompts, greedy, request.param)
    yield life
    life.driver.close()


def test_every_pressure_at_once(life):
    """Batch sizes between buckets, chunks, forks, evictions, early ends: all from one program."""
    steps = []
    for num_generations in (1, 3):
        life.check_a_round(num_generations)
        steps += life.driver.steps
    assert {step.bucket for step in steps} == {None, 2, 5}
    assert {step.num_requests for step in steps if step.bucket == 5} & {3, 4}
    assert any(step.bucket is None and step.kind == "decode" for step in steps), "nobody was evicted"
    assert any(tokens[-1] == life.eos for tokens in life.expected())
    assert programs_and_recompiles(life.driver) == (1, 0)


def test_a_round_after_an_error_in_the_middle_of_a_burst(life, monkeypatch):
    original, calls = EagerSteps.run, []

    def fail_in_second(runner, bucket, num_steps):
        calls.append(1)
        original(runner, bucket, max(1, num_steps // len(calls)))
        if len(calls) == 2:
            raise ArithmeticError("in the middle")

    life.check_a_round()
    before = programs_and_recompiles(life.driver)
    with monkeypatch.context() as patch, pytest.raises(ArithmeticError):
        patch.setattr(EagerSteps, "run", fail_in_second)
        life.drive()
    for completion, tokens in zip(life.driver.partial_completions.values(), life.expected(), strict=True):
        assert completion.completion_ids == tokens[: len(completion)]
    life.check_a_round()
    assert programs_and_recompiles(life.driver) == before


def test_no_recompile_over_what_trainers_do(life):
    """Inference mode, gradient checkpointing, train mode, a backward pass, new values, other gradient flags."""
    life.check_a_round()
    before = programs_and_recompiles(life.driver)
    with torch.inference_mode():
        life.check_a_round()
    model = life.model
    model.activation_checkpointing_enable()
    model.train()
    model.model.layers[0].requires_grad_(False)
    inputs = torch.tensor([life.prompts[-1]])
    model(input_ids=inputs, labels=inputs).loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.sub_(0.1 * parameter.grad)
                parameter.grad = None
    tokens = life.drive()
    assert model.training
    assert model.is_activation_checkpointing
    assert not any(parameter.requires_grad for parameter in model.model.layers[0].parameters())
    assert model.lm_head.weight.requires_grad
    model.eval()
    model.activation_checkpointing_disable()
    assert tokens == life.expected()
    model.requires_grad_(True)
    life.check_a_round()
    assert programs_and_recompiles(life.driver) == before


@pytest.mark.parametrize("fusion", ["none", pytest.param("projections", marks=slow)])
def test_an_adapter_is_switched_between_rounds(new_model, prompts, greedy, fusion):
    """Off and on again, with blocks shared within a round: keys and values of one policy never serve another."""
    settings = {"r": 4, "target_modules": ["q_proj", "v_proj", "up_proj"], "init_lora_weights": False}
    torch.manual_seed(0)
    model = get_peft_model(new_model("qwen3", num_hidden_layers=1), LoraConfig(**settings)).eval()

    def check():
        expected = [greedy(model, prompt, NUM_NEW) for prompt in prompts]
        assert drive(driver, prompts) == expected
        programs, recompiles = programs_and_recompiles(driver)
        assert (programs > 0, recompiles) == (True, 0)
        return expected

    with build_driver(model, fusion=fusion, allow_block_sharing=True, buckets=(4,)) as driver:
        attached = check()
        with model.disable_adapter():
            plain = check()
        assert check() == attached != plain
        assert driver.resolved["fusion"] == fusion


def test_code_that_cannot_be_traced_is_named_with_the_mode_and_the_reason(new_model, prompts, greedy):
    model = new_model("qwen3", num_hidden_layers=1)
    mlp = model.model.layers[0].mlp

    def look_at_values(hidden):
        if float(hidden.sum()) > 1e9:
            raise OverflowError
        return type(mlp).forward(mlp, hidden)

    mlp.forward = look_at_values
    message = r"default cannot compile the decode step of [24] rows: .*(item|float|data)"
    with build_driver(model) as driver:
        for attempt in (driver.warmup, lambda: drive(driver, prompts)):
            with pytest.raises(EngineError, match=message):
                attempt()
    with build_driver(model, compile_mode="eager") as driver:
        assert drive(driver, prompts) == [greedy(model, prompt, NUM_NEW) for prompt in prompts]
