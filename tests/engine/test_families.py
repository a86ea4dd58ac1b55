"""The README's table of model families: exact against transformers' eager `generate`, or refused without weights.

Windows are shorter than most prompts and are passed while decoding, too.
"""

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from cbexp.engine import UnsupportedModelError
from cbexp.engine.support import find_architecture_problem, require_supported_model
from tests.engine.models import FAMILIES, VOCAB_SIZE

REFUSED = {
    "qwen3_5": "takes more than text",
    "qwen3_next": "linear_attention, which keep a recurrent state",
    "mamba": "recurrent state",
    "deepseek_v3": "multi-head latent attention has keys and values of different shapes",
    "mimo_v2_flash": "differ in head size",
    "llama4_text": "chunked_attention",
    "llava": "takes more than text",
    "gemma3n_text": "use the keys and values of others",
    "dots3_note_text": "layers differ in shape",
    "doge": "masks of its own",
    "bloom": "attention interface",
    "t5": "encoder-decoder",
    "bert": "an encoder",
}


def problem_of(model_type, **changes):
    """Of a config and transformers' class for it, without weights."""
    config = AutoConfig.for_model(model_type)
    config.update(changes)
    is_known = type(config) in AutoModelForCausalLM._model_mapping
    model_class = AutoModelForCausalLM._model_mapping[type(config)] if is_known else None
    return find_architecture_problem(config, model_class)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_served_family_equals_generate(family, check_drive, prompts, references, shared_model):
    """At once in an exactly sized cache; in chunks; in one of 0.6 of its size, which evicts and reads again."""
    different = {token for tokens in references(family, prompts) for token in tokens}
    assert len(different) > 15, "a model that repeats itself proves nothing"
    roomy = check_drive(family, prompts)
    assert [(step.kind, step.num_requests) for step in roomy.steps] == [("prefill", 7), ("decode", 7)]
    assert roomy.resolved["safety_margin"] == 0
    check_drive(family, prompts, max_batch_tokens=13)
    used = roomy.resolved["num_blocks"] * max(step.cache_used_fraction for step in roomy.steps)
    scheduler = ("fifo", "prefill_first")[list(FAMILIES).index(family) % 2]
    crowded = check_drive(family, prompts, num_blocks=int(0.6 * used), scheduler=scheduler)
    assert max(step.num_waiting for step in crowded.steps[1:]) > 0, "nobody waited"
    assert crowded.resolved["safety_margin"] > 0
    assert problem_of(shared_model(family).config.model_type) is None


@pytest.mark.parametrize("model_type", REFUSED)
def test_a_family_is_refused_without_weights(model_type):
    assert REFUSED[model_type] in problem_of(model_type)


@pytest.mark.parametrize("change", [{"use_bidirectional_attention": True}, {"is_causal": False}], ids=str)
def test_attention_that_looks_ahead_is_refused(change):
    assert "looks ahead" in problem_of("gemma3_text", **change)


def test_a_refusal_names_the_model_and_the_reason():
    config = AutoConfig.for_model("doge", vocab_size=VOCAB_SIZE, hidden_size=64, num_hidden_layers=1)
    message = r"DogeForCausalLM \(model type doge\) cannot be driven: .*masks of its own"
    with pytest.raises(UnsupportedModelError, match=message):
        require_supported_model(AutoModelForCausalLM.from_config(config))
