"""Both drivers give, token for token in fp32, what `generate` gives for each prompt alone."""

from itertools import pairwise

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import GptOssConfig, GptOssForCausalLM, MistralConfig, MistralForCausalLM

from cbexp.drivers.generate import GenerateDriver
from tests.drivers.conftest import build_model, drive, ids_of, make_config

LIMITS = [3, 8, 5, 1, 8, 2]


def test_several_lengths_over_several_rounds(make_driver, model, prompts, generate_alone):
    driver = make_driver(model)
    driver.warmup()
    expected = [generate_alone(model, prompt, 8) for prompt in prompts]
    assert len(set(expected)) == len(prompts)
    for order in (slice(None), slice(None, None, -1), slice(1)):
        completions = drive(driver, prompts[order])
        assert ids_of(completions) == expected[order]
        assert [list(c.prompt_ids) for c in completions] == prompts[order]
        assert {c.finish_reason for c in completions} == {"length"}


def test_generations_of_a_prompt_are_adjacent_and_have_its_limit(make_driver, model, prompts, generate_alone):
    driver = make_driver(model, max_requests_per_batch=4)  # less than there are
    completions = drive(driver, prompts, num_generations=3, max_new_tokens=LIMITS)
    expected = [generate_alone(model, prompt, limit) for prompt, limit in zip(prompts, LIMITS, strict=True)]
    assert ids_of(completions) == [ids for ids in expected for _ in range(3)]


def test_eos_ends_a_request_and_is_part_of_it(make_driver, model, prompts, generate_alone):
    free = [generate_alone(model, prompt, 8) for prompt in prompts]
    eos = (free[0][2], free[2][4])
    driver = make_driver(model, eos_token_id=eos)
    completions = drive(driver, prompts)
    assert ids_of(completions) == [generate_alone(model, prompt, 8, eos) for prompt in prompts]
    assert completions[0].finish_reason == "eos"
    assert completions[0].completion_ids[-1] in eos
    assert len(completions[0]) < 8
    for completion in completions:
        assert (completion.finish_reason == "eos") == (completion.completion_ids[-1] in eos)
    # Also as the last token that is allowed, and not beyond that while others go on.
    whole, cut = (drive(driver, prompts[1:3], max_new_tokens=[8, limit])[1] for limit in (5, 4))
    assert (whole.completion_ids, whole.finish_reason) == (completions[2].completion_ids, "eos")
    assert (cut.completion_ids, cut.finish_reason) == (whole.completion_ids[:4], "length")


def test_lora_adapters_take_part(make_driver, qwen3, prompts, generate_alone):
    plain = [generate_alone(qwen3, prompt, 8) for prompt in prompts]
    torch.manual_seed(1)
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    adapted = get_peft_model(qwen3, config).eval()
    expected = [generate_alone(adapted, prompt, 8) for prompt in prompts]
    assert expected != plain
    assert ids_of(drive(make_driver(adapted), prompts)) == expected


def test_new_weights_take_effect_between_rounds(make_driver, qwen3, prompts, generate_alone):
    driver = make_driver(qwen3, allow_block_sharing=True)
    before = ids_of(drive(driver, prompts))
    with torch.no_grad():
        qwen3.model.layers[0].self_attn.v_proj.weight.mul_(-1.0)
    after = ids_of(drive(driver, prompts))
    assert after == [generate_alone(qwen3, prompt, 8) for prompt in prompts]
    assert after != before


def test_eager_attention(make_driver, prompts, qwen3, generate_alone):
    qwen3.set_attn_implementation("eager")
    expected = [generate_alone(qwen3, prompt, 8) for prompt in prompts]
    driver = make_driver(qwen3)
    for _ in range(2):
        assert ids_of(drive(driver, prompts)) == expected
        assert qwen3.config._attn_implementation == "eager"


WINDOWS = {"sliding_window": 8, "pad_token_id": 0}


@pytest.mark.parametrize(
    ("model_class", "config_class", "extra"),
    [
        (MistralForCausalLM, MistralConfig, {}),
        (GptOssForCausalLM, GptOssConfig, {"num_hidden_layers": 4, "num_local_experts": 4}),
    ],
)
def test_sliding_windows(make_driver, prompts, generate_alone, model_class, config_class, extra):
    model = build_model(model_class, config_class, **WINDOWS, **extra)
    expected = [generate_alone(model, prompt, 8) for prompt in prompts]
    completions = drive(make_driver(model), prompts, num_generations=2)
    assert ids_of(completions) == [ids for ids in expected for _ in range(2)]


def test_manager_where_a_window_bounds_what_a_request_stores(make_manager, generate_alone):
    model = build_model(MistralForCausalLM, MistralConfig, **WINDOWS)
    prompt = list(range(1, 41))
    # Four blocks of four tokens: more than a window, and far less than the prompt.
    completions = drive(make_manager(model, num_blocks=4, page_size=4), [prompt])
    assert ids_of(completions) == [generate_alone(model, prompt, 8)]


def test_manager_with_chunked_prefill(make_manager, qwen3, prompts, generate_alone):
    completions = drive(make_manager(qwen3, max_batch_tokens=12, scheduler="prefill_first"), prompts)
    assert ids_of(completions) == [generate_alone(qwen3, prompt, 8) for prompt in prompts]


def test_manager_with_a_cache_that_evicts(make_manager, qwen3, prompts, generate_alone):
    driver = make_manager(qwen3, num_blocks=16, page_size=4)
    completions = drive(driver, prompts * 3, max_new_tokens=24)
    assert ids_of(completions) == [generate_alone(qwen3, prompt, 24) for prompt in prompts] * 3
    # Evicted: upstream forgets when it began.
    assert any(c.timings.first_token_s is None for c in completions)
    assert driver.resolved["safety_margin"] > 0


def test_manager_with_shared_blocks(make_manager, qwen3, generate_alone):
    # 17 tokens: the last one follows on a whole shared page, where a fork's parent would have nothing to run.
    base = list(range(1, 18))
    prompts = [base, [*base[:16], 50], base, [*base, 60], [7]]
    driver = make_manager(qwen3, allow_block_sharing=True, page_size=4)
    expected = [generate_alone(qwen3, prompt, 8) for prompt in prompts]
    for _ in range(2):
        completions = drive(driver, prompts, num_generations=2)
        assert ids_of(completions) == [ids for ids in expected for _ in range(2)]
    assert driver.resolved["block_sharing"] is True


def test_manager_where_a_forks_parent_would_be_alone_with_nothing_to_run(make_manager, qwen3, generate_alone):
    one_token = drive(make_manager(qwen3), [[7]], num_generations=2)
    assert ids_of(one_token) == [generate_alone(qwen3, [7], 8)] * 2
    prompt = list(range(1, 18))
    driver = make_manager(qwen3, allow_block_sharing=True, page_size=4, max_requests_per_batch=1)
    completions = drive(driver, [prompt, prompt], num_generations=2, max_new_tokens=1)
    assert ids_of(completions) == [generate_alone(qwen3, prompt, 1)] * 4


# What the driver of `generate` sees of its steps


def test_steps_of_a_drive(qwen3, prompts):
    """By hand: a row that is done stays until its batch is, as padding, like what is left of a prompt."""
    driver = GenerateDriver(qwen3, make_config(max_requests_per_batch=4))
    drive(driver, prompts, max_new_tokens=[1, 2, 3, 4, 2, 3])
    names = ("kind", "num_requests", "num_tokens", "num_padding", "num_finished", "num_waiting")
    assert [tuple(getattr(step, name) for name in names) for step in driver.steps] == [
        ("prefill", 4, 1 + 3 + 40 + 17, 4 * 40 - 61, 1, 2),
        ("decode", 3, 3, 1, 1, 2),
        ("decode", 2, 2, 2, 1, 2),
        ("decode", 1, 1, 3, 1, 2),
        ("prefill", 2, 16 + 8, 8, 0, 0),
        ("decode", 2, 2, 0, 1, 0),
        ("decode", 1, 1, 1, 1, 0),
    ]
    assert all(a.start_s < a.end_s <= b.start_s for a, b in pairwise(driver.steps))
    drive(driver, prompts[:1], max_new_tokens=2)
    assert len(driver.steps) == 2
