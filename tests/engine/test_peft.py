"""A LoRA adapter, attached and not merged, generates as PEFT's own `generate` does."""

from __future__ import annotations

import pytest
from peft import LoraConfig, get_peft_model

from tests.engine.driving import drive

NUM_NEW = 12


@pytest.fixture
def adapted(new_model):
    """PEFT's default initialisation is a no-op, hence random weights; the base is not merged."""
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "up_proj"], init_lora_weights=False)
    return get_peft_model(new_model("qwen3"), config).eval()


def test_an_attached_adapter_is_applied(adapted, make_driver, prompts, greedy, reference):
    expected = [greedy(adapted, prompt, NUM_NEW) for prompt in prompts]
    driver = make_driver(adapted)
    assert drive(driver, prompts) == expected
    assert expected != [reference("qwen3", prompt, NUM_NEW) for prompt in prompts]
    assert driver.resolved["model_class"] == "Qwen3ForCausalLM"


def test_a_disabled_adapter_is_not(adapted, make_driver, prompts, reference):
    driver = make_driver(adapted)
    enabled = drive(driver, prompts)
    with adapted.disable_adapter():
        assert drive(driver, prompts) == [reference("qwen3", prompt, NUM_NEW) for prompt in prompts]
    assert drive(driver, prompts) == enabled


def test_a_merged_adapter_says_the_same(adapted, make_driver, prompts):
    attached = drive(make_driver(adapted), prompts)
    assert drive(make_driver(adapted.merge_and_unload()), prompts) == attached


def test_the_adapter_is_trained_between_rounds(adapted, make_driver, prompts, greedy):
    import torch

    adapted.train()
    driver = make_driver(adapted)
    before = drive(driver, prompts)
    assert adapted.training
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.neg_()
    after = drive(driver, prompts)
    assert after != before
    adapted.eval()
    assert after == [greedy(adapted, prompt, NUM_NEW) for prompt in prompts]
