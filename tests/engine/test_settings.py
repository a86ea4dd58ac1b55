"""Which setting wins, what of a generation config counts, and what is recorded of it all."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from transformers import GenerationConfig

from cbexp import config as schema
from cbexp.engine import CBSyncConfig, EngineError, SyncCBDriver, cb_internals
from cbexp.engine import settings as engine_settings
from cbexp.peers import manager_settings


def lengths(driver, prompts, **kwargs):
    driver.add_requests(prompts, **kwargs)
    return [len(c) for c in driver.drive_until_empty().values()]


def test_max_new_tokens_request_over_config_over_generation_config(shared_model, make_driver, prompts):
    model = shared_model("qwen3")
    two = prompts[:2]
    from_generation_config = make_driver(model, GenerationConfig(max_new_tokens=2), max_new_tokens=None)
    assert lengths(from_generation_config, two) == [2, 2]
    from_config = make_driver(model, GenerationConfig(max_new_tokens=2), max_new_tokens=3)
    assert lengths(from_config, two) == [3, 3]
    assert lengths(from_config, two, max_new_tokens=4) == [4, 4]
    assert lengths(from_config, two, max_new_tokens=[1, 5]) == [1, 5]
    assert lengths(from_config, two) == [3, 3]


def test_the_models_own_generation_config_is_the_last_resort(new_model, make_driver, prompts):
    model = new_model("qwen3")
    model.generation_config.max_new_tokens = 4
    assert lengths(make_driver(model, max_new_tokens=None), prompts[:1]) == [4]


def test_max_new_tokens_set_nowhere(shared_model, make_driver, prompts):
    driver = make_driver(shared_model("qwen3"), max_new_tokens=None)
    with pytest.raises(ValueError, match="max_new_tokens is set nowhere"):
        driver.add_requests(prompts)
    assert lengths(driver, prompts[:1], max_new_tokens=1) == [1]


def test_eos_config_over_generation_config(shared_model, make_driver, prompts, reference):
    model, prompt = shared_model("qwen3"), prompts[5]
    full = reference("qwen3", prompt, 12)
    early, late = full[2], next(token for token in full[5:] if token not in full[:5])
    early_length, late_length = full.index(early) + 1, full.index(late) + 1
    given = GenerationConfig(eos_token_id=early)
    assert lengths(make_driver(model, given), [prompt]) == [early_length]
    assert lengths(make_driver(model, given, eos_token_id=late), [prompt]) == [late_length]
    assert lengths(make_driver(model, given, eos_token_id=[late, early]), [prompt]) == [early_length]
    assert lengths(make_driver(model, given, eos_token_id=()), [prompt]) == [12]
    # Upstream leaves -1 in a config without EOS.
    assert lengths(make_driver(model, GenerationConfig(eos_token_id=-1)), [prompt]) == [12]


@pytest.mark.parametrize(
    "ids", [np.int64(5), np.array([5]), [np.int64(5)], torch.tensor(5), [torch.tensor(5)]]
)
def test_eos_ids_as_numpy_and_torch_have_them(shared_model, make_driver, ids):
    model = shared_model("qwen3")
    assert make_driver(model, eos_token_id=ids).resolved["eos_token_ids"] == [5]
    assert make_driver(model, GenerationConfig(eos_token_id=ids)).resolved["eos_token_ids"] == [5]


@pytest.mark.parametrize("ids", [5.0, True, [[5]], "5"])
def test_eos_ids_that_are_no_ints_are_said_to_be_none(shared_model, make_driver, ids):
    with pytest.raises(
        ValueError, match=r"eos_token_id .* \(\w+\) is not a token id of this model: a plain int"
    ):
        make_driver(shared_model("qwen3"), eos_token_id=ids)


@pytest.mark.parametrize("given", [{"eos_token_id": 5}, "eos", 5, GenerationConfig])
def test_a_generation_config_of_another_type_is_refused(shared_model, make_driver, given):
    with pytest.raises(TypeError, match=r"generation_config=.* pass a GenerationConfig"):
        make_driver(shared_model("qwen3"), given)


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("max_new_tokens", "x", TypeError),
        ("max_new_tokens", 2.5, TypeError),
        ("max_new_tokens", True, TypeError),
        ("max_new_tokens", 0, ValueError),
        ("pad_token_id", "x", TypeError),
        ("eos_token_id", "x", ValueError),
    ],
)
def test_what_a_generation_config_may_not_say(shared_model, make_driver, name, value, error):
    given = GenerationConfig()
    setattr(given, name, value)  # its constructor refuses some of them
    with pytest.raises(error, match=rf"generation_config\.{name}.*{value}"):
        make_driver(shared_model("qwen3"), given, max_new_tokens=None)


def test_what_does_not_count_of_a_generation_config_may_be_anything(new_model, make_driver):
    model = new_model("qwen3")
    model.generation_config.pad_token_id = -1  # as the first Llama's
    assert make_driver(model).resolved["pad_token_id"] == -1
    model.generation_config.max_new_tokens = 0
    assert make_driver(model, max_new_tokens=3).resolved["max_new_tokens"] == 3


def test_nothing_else_of_a_generation_config_leaks_in(new_model, make_driver, prompts, reference):
    model = new_model("qwen3")
    model.generation_config = GenerationConfig(
        do_sample=True,
        temperature=5.0,
        top_k=3,
        repetition_penalty=3.0,
        no_repeat_ngram_size=1,
        num_return_sequences=4,
        min_new_tokens=2,
        forced_eos_token_id=90,
        suppress_tokens=list(range(40)),
        max_length=5,
        stop_strings=["x"],
    )
    for given in (None, model.generation_config):
        driver = make_driver(model, given)
        request_ids = driver.add_requests(prompts)
        completions = driver.drive_until_empty()
        assert list(completions) == request_ids
        expected = [reference("qwen3", prompt, 12) for prompt in prompts]
        assert [c.completion_ids for c in completions.values()] == expected


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"do_sample": True}, "do_sample=True is not available yet"),
        ({"cuda_graph": True}, "cuda_graph=True needs a CUDA device, and the model is on cpu"),
        ({"compile_mode": "reduce-overhead"}, "compile_mode='reduce-overhead' needs a CUDA device"),
        ({"fusion": "layers"}, "fusion='layers' needs a CUDA device"),
        (
            {"compile_mode": "max-autotune", "cuda_graph": True},
            "cuda_graph=True does not go with compile_mode='max-autotune'",
        ),
        ({"compile_region": "layer"}, "compile_region='layer' does not go with compile_mode=None"),
        (
            {"compile_region": "layer", "compile_mode": "reduce-overhead"},
            "compile_region='layer' does not go with compile_mode='reduce-overhead'",
        ),
        ({"buckets": (2, 4), "batch_shape": "natural"}, "buckets are without effect"),
        ({"attn_implementation": "eager"}, "neither the engine's own .* loaded with .'sdpa'"),
        ({"attn_implementation": "sdpa", "compile_mode": "default"}, "compile_mode='default' works on"),
        ({"attn_implementation": "sdpa", "cuda_graph": True}, "cuda_graph=True works on the engine's own"),
        ({"attn_implementation": "sdpa", "batch_shape": "full"}, "batch_shape='full' works on"),
        ({"attn_implementation": "sdpa", "max_burst": 3}, "max_burst=3 works on"),
        ({"attn_implementation": "sdpa", "self_check": False}, "self_check=False works on"),
        ({"attn_implementation": "sdpa", "recompile_limit": 5}, "recompile_limit=5 works on"),
        ({"recompile_limit": 5}, "recompile_limit=5 is without effect when compile_mode=None"),
    ],
)
def test_what_does_not_work_is_refused_in_one_line(shared_model, make_driver, settings, said):
    with pytest.raises(EngineError, match=said) as error:
        make_driver(shared_model("qwen3"), **settings)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("page_size", 3),
        ("num_blocks", 0),
        ("max_batch_tokens", 0),
        ("max_requests_per_batch", 0),
        ("max_new_tokens", 0),
        ("max_burst", 0),
        ("recompile_limit", 0),
        ("scheduler", "lifo"),
        ("compile_mode", "fastest"),
        ("compile_region", "block"),
        ("batch_shape", "round"),
        ("fusion", "all"),
        ("buckets", ()),
        ("buckets", (0, 4)),
        ("buckets", (4, 4)),
        ("eos_token_id", 97),
        ("eos_token_id", [1, -1]),
        ("pad_token_id", -5),
    ],
)
def test_impossible_values_are_named(shared_model, make_driver, name, value):
    with pytest.raises(ValueError, match=name):
        make_driver(shared_model("qwen3"), **{name: value})


def test_resolved_settings_are_plain_json_and_what_runs(shared_model, make_driver):
    driver = make_driver(
        shared_model("llama"), num_blocks=40, eos_token_id=7, pad_token_id=0, scheduler="prefill_first"
    )
    resolved = driver.resolved
    assert json.loads(json.dumps(resolved)) == resolved
    assert resolved | {"cache_bytes": 0, "transformers": ""} == {
        "transformers": "",
        "model_class": "LlamaForCausalLM",
        "attn_implementation": "cbexp",
        "dtype": "float32",
        "device": "cpu",
        "do_sample": False,
        "max_new_tokens": 12,
        "eos_token_ids": [7],
        "pad_token_id": 0,
        "has_growing_cache": False,
        "page_size": 8,
        "num_blocks": 40,
        "cache_tokens": 320,
        "cache_bytes": 0,
        "max_batch_tokens": 256,
        "max_requests_per_batch": 40,
        "max_blocks_per_request": 0,
        "decode_fast_path": False,
        "block_sharing": False,
        "scheduler": "prefill_first",
        "async_batching": False,
        "cuda_graph": False,
        "compile_mode": None,
        "cpu_offload_gib": 0.0,
        "max_memory_fraction": 0.9,
        "decode_mode": "eager",
        "compile_region": "model",
        "fusion": "none",
        "batch_shape": "buckets",
        "buckets": [1, 2, 4, 8, 16, 32, 40],
        "max_burst": 128,
        "prefill_attention": "per_sequence",
        "self_check": False,  # nothing to check: the steps are the reference
        "self_check_results": [],
    }
    # Keys and values, two layers, two heads of 8 in fp32: 256 bytes a token; two trash sectors of one block each.
    assert resolved["cache_bytes"] == 256 * 8 * (40 + 2)


def test_block_sharing_is_recorded_as_it_runs(shared_model, make_driver):
    """Models with sliding windows cannot share, whatever was asked."""
    for family, is_shared in (("qwen3", True), ("mistral", False)):
        driver = make_driver(shared_model(family), num_blocks=40, allow_block_sharing=True)
        assert driver.resolved["block_sharing"] is is_shared


@pytest.mark.parametrize(("family", "is_told"), [("qwen3", False), ("mistral", True), ("gemma2", True)])
@pytest.mark.parametrize("asked", [False, True])
def test_block_sharing_that_has_no_effect_is_told(shared_model, recwarn, family, is_told, asked):
    SyncCBDriver(shared_model(family), config=CBSyncConfig(page_size=8, allow_block_sharing=asked)).close()
    told = [str(warning.message) for warning in recwarn]
    if is_told and asked:
        (line,) = told
        assert line.startswith("allow_block_sharing=True has no effect with this")
        assert recwarn[0].filename == __file__
    else:
        assert told == []


def test_batches_never_hold_more_requests_than_tokens(shared_model, make_driver):
    driver = make_driver(shared_model("qwen3"), num_blocks=40, max_batch_tokens=6, max_requests_per_batch=30)
    assert driver.resolved["max_requests_per_batch"] == 6


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"page_size": "256"}, TypeError, "page_size='256' must be a whole number"),
        ({"num_blocks": 2.5}, TypeError, "num_blocks=2.5 must be a whole number"),
        ({"max_burst": None}, TypeError, "max_burst=None must be a whole number"),
        ({"allow_block_sharing": "off"}, TypeError, "allow_block_sharing='off' must be True or False"),
        ({"buckets": "14"}, TypeError, "buckets='14' must be a list of whole numbers"),
        ({"buckets": [1.5]}, TypeError, "must be a list of whole numbers"),
        ({"on_step": 3}, TypeError, "on_step=3 must be a function"),
        ({"buckets": [10**6]}, ValueError, "from 1 to 1024"),
        ({"max_burst": 10**9}, ValueError, "at most 4096"),
        ({"compile_mode": "max_autotune"}, ValueError, "Eager is None"),
    ],
)
def test_a_value_of_another_kind_is_refused_by_name(shared_model, settings, error, message):
    with pytest.raises(error, match=message):
        SyncCBDriver(shared_model("qwen3"), config=CBSyncConfig(max_new_tokens=3, **settings))


@pytest.mark.parametrize("eos", [torch.tensor([5]), torch.tensor(5), [5], 5])
def test_eos_of_a_generation_config_comes_in_all_shapes(shared_model, eos):
    generation_config = GenerationConfig(max_new_tokens=3)
    generation_config.eos_token_id = eos
    with SyncCBDriver(shared_model("qwen3"), generation_config) as driver:
        assert driver.resolved["eos_token_ids"] == [5]


@pytest.mark.parametrize("eos", [[2, None], "x", 1.5, 10**9])
def test_eos_of_a_generation_config_is_checked(shared_model, eos):
    generation_config = GenerationConfig(max_new_tokens=3)
    generation_config.eos_token_id = eos
    with pytest.raises(ValueError, match=r"generation_config.eos_token_id .* is not a token id"):
        SyncCBDriver(shared_model("qwen3"), generation_config)


def test_the_bounds_of_the_command_line_are_the_engines():
    bounds = (engine_settings.MAX_BUCKET, engine_settings.MAX_BURST)
    assert bounds == (schema.MAX_BUCKET, schema.MAX_BURST)
    shares = {cb_internals.MAX_MEMORY_FRACTION, manager_settings.MAX_MEMORY_FRACTION}
    assert shares == {schema.MAX_MEMORY_FRACTION}
