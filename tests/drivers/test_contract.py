"""What a caller may rely on from either driver: checked requests, ids, times, errors, a model given back as it was."""

import copy
import json
import random

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from cbexp.engine import EngineError, UnsupportedModelError, UnsupportedTransformersError
from tests.drivers.conftest import drive, ids_of


def random_states():
    return random.getstate(), torch.random.get_rng_state().tolist()


def test_what_cannot_be_served_is_refused_and_nothing_is_queued(make_driver, qwen3):
    driver = make_driver(qwen3)
    with pytest.raises(ValueError, match="exceed the model's 128 positions"):
        driver.add_requests([[1], [1] * 121])
    assert driver.drive_until_empty() == {}
    driver.close()
    with pytest.raises(EngineError, match="closed"):
        driver.add_requests([[1]])


def test_manager_refuses_what_its_cache_can_never_hold(make_manager, qwen3):
    driver = make_manager(qwen3, num_blocks=2)
    with pytest.raises(ValueError, match=r"30 prompt \+ 4 new tokens = 34 can never fit .* 32 tokens"):
        driver.add_requests([[1] * 30], max_new_tokens=4)
    (completion,) = drive(driver, [[1] * 29], max_new_tokens=4)  # the last token is never stored
    assert len(completion) == 4


def test_times_are_known_and_in_order(make_driver, qwen3, prompts):
    driver = make_driver(qwen3, max_requests_per_batch=2)
    for completion in drive(driver, prompts, num_generations=2):
        times = completion.timings
        known = [times.submitted_s, times.scheduled_s, times.first_token_s, times.finished_s]
        assert None not in known
        assert known == sorted(known)
        assert times.first_token_s < times.finished_s


def test_model_and_random_state_come_back_as_they_were(make_driver, qwen3, prompts):
    qwen3.set_attn_implementation("eager")
    qwen3.train()
    qwen3.model.layers[0].eval()
    modes = [module.training for module in qwen3.modules()]
    own_config, content = qwen3.generation_config, copy.deepcopy(qwen3.generation_config.to_dict())
    forward, before = qwen3.forward, random_states()

    def check():
        assert [module.training for module in qwen3.modules()] == modes
        assert qwen3.config._attn_implementation == "eager"
        assert qwen3.generation_config is own_config
        assert qwen3.generation_config.to_dict() == content
        assert qwen3.forward == forward
        assert not qwen3._forward_pre_hooks
        assert random_states() == before

    driver = make_driver(qwen3, eos_token_id=5)
    for use in (lambda: None, driver.warmup, lambda: driver.add_requests(prompts), driver.drive_until_empty):
        use()
        check()
    driver.close()
    check()


def test_of_the_models_generation_config_eos_alone_counts(make_driver, qwen3, prompts, generate_alone):
    expected = [generate_alone(qwen3, prompt, 8) for prompt in prompts]
    ended = [generate_alone(qwen3, prompt, 8, (expected[1][1],)) for prompt in prompts]
    own = qwen3.generation_config
    own.repetition_penalty, own.no_repeat_ngram_size = 5.0, 1
    own.suppress_tokens, own.eos_token_id, own.max_length = [expected[0][0]], [expected[1][1]], 5
    own.do_sample, own.temperature, own.num_return_sequences = True, 0.5, 3
    assert ids_of(drive(make_driver(qwen3), prompts)) == expected
    driver = make_driver(qwen3, eos_token_id=None)
    assert ids_of(drive(driver, prompts)) == ended != expected
    unused = driver.resolved["unused_model_defaults"]
    assert {"do_sample": True, "temperature": 0.5, "max_length": 5}.items() <= unused.items()
    assert "eos_token_id" not in unused


def test_resolved_settings_are_plain_json(make_driver, qwen3):
    driver = make_driver(qwen3, eos_token_id=(3, 4))
    for _ in range(2):
        resolved = json.loads(json.dumps(driver.resolved))
        assert (resolved["compile_mode"], resolved["attn_implementation"]) == ("eager", "sdpa")
        assert (resolved["eos_token_ids"], resolved["dtype"]) == ([3, 4], "float32")
        driver.warmup()


def test_unusable_settings_and_models_are_refused(make_driver, qwen3, monkeypatch):
    with pytest.raises(EngineError, match=r"compile\.mode=fastest does not work with driver="):
        make_driver(qwen3, compile_mode="fastest")
    with pytest.raises(ValueError, match=r"pad_token_id 97 .* is not a token id of this model"):
        make_driver(qwen3, pad_token_id=97)
    gpt2 = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=1, vocab_size=97))
    gpt2.config.is_encoder_decoder = True
    with pytest.raises(UnsupportedModelError, match="GPT2LMHeadModel"):
        make_driver(gpt2)
    monkeypatch.setattr("cbexp.engine.model_driver.transformers.__version__", "4.57.1")
    with pytest.raises(UnsupportedTransformersError, match=r"4\.57\.1"):
        make_driver(qwen3)
