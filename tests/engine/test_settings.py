"""Which setting wins, what of a generation config counts, what is refused, and what is recorded of it all."""

import json

import numpy as np
import pytest
import torch
from transformers import GenerationConfig, Qwen3Config

from cbexp.engine import CBSyncConfig, EngineError, Sampling, SyncCBDriver
from cbexp.engine.settings import check_config, check_device, resolve_decoding
from cbexp.engine.types import COMPILE_MODES
from tests.engine.driving import drive

VOCAB_SIZE = 97


def resolve(generation_config=None, model_defaults=None, **settings):
    config = CBSyncConfig(**settings)
    check_config(config)
    return resolve_decoding(config, generation_config, model_defaults, VOCAB_SIZE)


def with_values(**values):
    """A generation config, whose constructor refuses some of them."""
    config = GenerationConfig()
    for name, value in values.items():
        setattr(config, name, value)
    return config


# Limit, EOS and pad


def test_max_new_tokens_request_over_config_over_generation_config(new_model, make_driver, prompts):
    def lengths(driver, **kwargs):
        return [len(tokens) for tokens in drive(driver, prompts[:2], **kwargs)]

    model, two = new_model("qwen3"), GenerationConfig(max_new_tokens=2)
    driver = make_driver(model, two, max_new_tokens=3)
    assert lengths(driver, max_new_tokens=[1, 5]) == [1, 5]
    assert lengths(driver) == [3, 3]
    assert lengths(make_driver(model, two, max_new_tokens=None)) == [2, 2]
    driver = make_driver(model, max_new_tokens=None)
    with pytest.raises(ValueError, match="max_new_tokens is set nowhere"):
        lengths(driver)
    assert lengths(driver, max_new_tokens=1) == [1, 1]
    model.generation_config.max_new_tokens = 6  # nobody has asked for that
    with pytest.raises(ValueError, match="max_new_tokens is set nowhere"):
        lengths(make_driver(model, max_new_tokens=None))


@pytest.mark.parametrize("ids", [5, (np.int64(5),), torch.tensor([5])], ids=repr)
def test_eos_ids_come_in_all_shapes_and_those_of_the_config_count(ids):
    given, defaults = with_values(eos_token_id=ids), with_values(eos_token_id=7, pad_token_id=2)
    assert resolve(eos_token_id=ids).eos_token_ids == (5,)
    assert resolve(given).eos_token_ids == resolve(None, given).eos_token_ids == (5,)
    assert resolve(given, defaults, eos_token_id=[8, 9]).eos_token_ids == (8, 9)
    assert resolve(given, defaults, eos_token_id=()).eos_token_ids == ()
    assert (resolve(given, defaults).eos_token_ids, resolve(given, defaults).pad_token_id) == ((5,), 2)
    assert resolve(with_values(pad_token_id=3), defaults).eos_token_ids == (7,)


@pytest.mark.parametrize("ids", [5.0, True, "5", VOCAB_SIZE, [1, -1]], ids=repr)
def test_eos_ids_that_are_none_of_the_models(ids):
    message = r"eos_token_id .* \(\w+\) is not a token id of this model: a plain int, 0 to 96"
    with pytest.raises(ValueError, match=f"^{message}"):
        resolve(eos_token_id=ids)
    given = with_values(eos_token_id=ids)
    if ids == [1, -1]:  # upstream leaves -1 in a config without EOS
        assert resolve(given).eos_token_ids == (1,)
    else:
        with pytest.raises(ValueError, match=rf"^generation_config\.{message}"):
            resolve(given)
        with pytest.raises(ValueError, match=rf"^model\.generation_config\.{message}"):
            resolve(None, given)


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [("max_new_tokens", 2.5, TypeError), ("max_new_tokens", 0, ValueError), ("pad_token_id", "x", TypeError)],
)
def test_what_a_generation_config_may_not_say_where_it_counts(name, value, error):
    with pytest.raises(error, match=rf"generation_config\.{name}.*{value}"):
        resolve(with_values(**{name: value}))
    resolve(with_values(**{name: value}), **{name: 3})
    # Any pad token but its own, as the first Llama's.
    assert resolve(with_values(pad_token_id=-1)).pad_token_id == -1


def test_rows_end_where_generate_ends_them_whatever_config_is_passed(
    new_model, make_driver, prompts, references, greedy
):
    """EOS is the model's own where a passed config has none; its sampling defaults apply nowhere, and are named."""
    model, plain = new_model("qwen3"), references("qwen3", prompts)
    unused = {"do_sample": True, "temperature": 5.0, "top_k": 3, "repetition_penalty": 3.0, "max_length": 5}
    unused |= {"suppress_tokens": list(range(40)), "min_new_tokens": 2, "forced_eos_token_id": 90}
    unused |= {"num_return_sequences": 4, "max_new_tokens": 3}
    eos = plain[2][4]
    model.generation_config = GenerationConfig(**unused, bos_token_id=1, eos_token_id=eos)
    before = model.generation_config.to_dict()
    ended = [tokens[: tokens.index(eos) + 1] if eos in tokens else tokens for tokens in plain]
    for given in (None, GenerationConfig(max_new_tokens=5), GenerationConfig(temperature=1.0)):
        driver = make_driver(model, given)
        assert drive(driver, prompts) == ended != plain
        assert json.loads(json.dumps(driver.resolved))["unused_model_defaults"] == unused
    for given in (None, GenerationConfig()):
        assert drive(make_driver(model, given, eos_token_id=()), prompts) == plain
    assert model.generation_config.to_dict() == before

    # The same without a list of ours: `generate` fills what is None from the model's own config, too.
    model.generation_config = GenerationConfig(eos_token_id=eos)
    assert ended == [greedy(model, prompt, 12) for prompt in prompts]
    # One without EOS stays without: upstream would write -1 into it.
    model.generation_config = GenerationConfig()
    assert drive(make_driver(model), prompts) == plain
    assert model.generation_config.eos_token_id is None


REFUSED_FIELDS = {
    "temperature": 0.6,
    "top_p": 0.9,
    "top_k": 20,
    "min_p": 0.1,
    "num_beams": 2,
    "num_return_sequences": 4,
    "no_repeat_ngram_size": 3,
    "bad_words_ids": [[5]],
    "forced_bos_token_id": 3,
    "forced_eos_token_id": 3,
    "min_length": 4,
    "max_length": 20,
    "max_time": 1.5,
    "use_cache": False,
    "cache_implementation": "static",
    "output_scores": True,
    "chat_format": "of somebody's own",
}


def test_every_other_field_of_a_passed_config_is_refused_by_name():
    for name, value in REFUSED_FIELDS.items():
        with pytest.raises(EngineError, match=rf"^generation_config sets {name}=.*: leave that out") as error:
            resolve(with_values(**{name: value}))
        assert repr(value) in str(error.value)
    with pytest.raises(EngineError) as error:
        resolve(with_values(**(REFUSED_FIELDS | {"bad_words_ids": torch.arange(2000)}), max_new_tokens=4))
    message = str(error.value)
    assert [name for name in REFUSED_FIELDS if f"{name}=" not in message] == []
    assert "without do_sample=True it has no effect" in message
    assert "the limit is max_new_tokens" in message
    assert "\n" not in message
    assert len(message) < 1000


def test_a_passed_config_says_how_tokens_are_chosen():
    """As it says to `generate`, defaults included; the driver's own `sampling` goes before it."""
    given = with_values(do_sample=True)
    assert resolve(given).sampling == Sampling(temperature=1.0, top_k=50)
    values = {"temperature": 0.5, "top_k": 0, "top_p": 0.9, "min_p": 0.1, "repetition_penalty": 1.5}
    values |= {"min_new_tokens": 2, "suppress_tokens": torch.tensor([3, 4])}
    assert resolve(with_values(do_sample=True, **values)).sampling == Sampling(
        temperature=0.5,
        top_k=0,
        top_p=0.9,
        min_p=0.1,
        repetition_penalty=1.5,
        min_new_tokens=2,
        suppress_token_ids=(3, 4),
    )
    assert resolve(with_values(repetition_penalty=2.0)).sampling == Sampling(repetition_penalty=2.0)
    assert resolve(given, sampling=Sampling(top_p=0.5)).sampling == Sampling(top_p=0.5)
    with pytest.raises(ValueError, match="generation_config: stop_strings need the tokenizer"):
        resolve(with_values(stop_strings="###"))
    with pytest.raises(ValueError, match=r"generation_config: temperature=-1 must be a number of at least 0"):
        resolve(with_values(do_sample=True, temperature=-1))


def test_sampling_that_makes_no_sense_is_named(shared_model, make_driver):
    driver = make_driver(shared_model("qwen3"), max_new_tokens=5)
    wrong = {
        "temperature": (-0.1, float("nan"), float("inf"), "1", True),
        "top_k": (-2, 1.0, 2**31),
        "top_p": (-0.1, 1.1, None),
        "min_p": (-0.1, 2),
        "repetition_penalty": (0, -1, float("inf")),
        "min_new_tokens": (-1, 6, 1.5),
        "stop_token_ids": (5, [VOCAB_SIZE], [True], "5"),
        "stop_strings": ("x", [""], [5], ["x"]),  # the last one for want of a tokenizer
        "suppress_token_ids": ([-1], list(range(VOCAB_SIZE))),
    }
    for name, values in wrong.items():
        for value in values:
            with pytest.raises(ValueError, match=rf"prompts\[1\].*{name}") as error:
                driver.add_requests([[1], [2]], sampling=[Sampling(), Sampling(**{name: value})])
            assert "\n" not in str(error.value)
    for sampling in ("greedy", [Sampling()], [Sampling(), 3], 0.5):
        with pytest.raises(ValueError, match="sampling"):
            driver.add_requests([[1], [2]], sampling=sampling)
    assert driver.drive_until_empty() == {}
    for seed in (-1, 2**64):
        with pytest.raises(ValueError, match=f"seed={seed} must be from 0 to {2**64 - 1}"):
            make_driver(shared_model("qwen3"), seed=seed)


def test_what_changes_nothing_may_be_passed():
    defaults = GenerationConfig()._get_default_generation_params()
    full = {name: value for name, value in defaults.items() if name != "max_length"}
    silent = {"bos_token_id": 1, "decoder_start_token_id": 2, "transformers_version": "4.40.0"}
    old = {"renormalize_logits": False, "generation_kwargs": {}, "cache_implementation": "hybrid", "top_k": 0}
    old |= {"num_assistant_tokens": 5, "num_assistant_tokens_schedule": "heuristic", "suppress_tokens": []}
    for values in (full, full | silent, full | old):
        given = with_values(**values, max_new_tokens=3, eos_token_id=5)
        assert resolve(given) == resolve(max_new_tokens=3, eos_token_id=5)
    # As transformers itself makes them of a file and of a model's config.
    assert resolve(GenerationConfig.from_dict(full | silent)) == resolve()
    assert resolve(GenerationConfig.from_model_config(Qwen3Config(bos_token_id=1))).eos_token_ids == ()


# What is refused

NO_CHOICE = "is not a choice: "


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"page_size": "256"}, TypeError, "page_size='256' must be a whole number"),
        ({"max_new_tokens": True}, TypeError, "max_new_tokens=True must be a whole number"),
        ({"allow_block_sharing": "off"}, TypeError, "allow_block_sharing='off' must be True or False"),
        ({"buckets": "14"}, TypeError, "buckets='14' must be a list of whole numbers"),
        ({"on_step": 3}, TypeError, "on_step=3 must be a function"),
        ({"page_size": 3}, ValueError, "page_size=3 is too small: it must be at least 4"),
        ({"num_blocks": 0}, ValueError, "num_blocks=0 is too small: it must be at least 1"),
        ({"max_burst": 10**9}, ValueError, "at most 4096"),
        ({"scheduler": "lifo"}, ValueError, f"scheduler='lifo' {NO_CHOICE}'fifo', 'prefill_first'"),
        ({"compile_mode": "none"}, ValueError, f"{NO_CHOICE}'eager', 'default', 'reduce_overhead'"),
        *(({"buckets": b}, ValueError, "from 1 to 1024 in ascending") for b in ((), (0, 4), (4, 4), [1025])),
        ({"buckets": (2, 4), "max_requests_per_batch": 5}, ValueError, "buckets end at 4"),
        ({"buckets": (2, 4), "batch_shape": "natural"}, EngineError, "buckets are without effect"),
        (
            {"sampling": {"temperature": 1}},
            TypeError,
            "sampling={'temperature': 1} must be a Sampling, or None",
        ),
        ({"seed": 1.5}, TypeError, "seed=1.5 must be a whole number"),
        ({"recompile_limit": 5}, EngineError, "without effect when compile_mode='eager'"),
        *(
            (
                {"attn_implementation": "sdpa", name: value},
                EngineError,
                f"{name}={value!r} works on the engine's own decode steps: it needs attn_implementation='cbexp'",
            )
            for name, value in (("compile_mode", "cuda_graph"), ("self_check", False), ("fusion", "layers"))
        ),
    ],
    ids=str,
)
def test_a_setting_that_makes_no_sense_is_named_in_one_line(settings, error, message):
    with pytest.raises(error) as raised:
        check_config(CBSyncConfig(**settings))
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


def test_what_needs_cuda_is_refused_elsewhere():
    check_config(CBSyncConfig(attn_implementation="sdpa", fusion="none"))  # which any attention goes with
    for name, mode in COMPILE_MODES.items():
        if mode.graphs is None:
            check_device(CBSyncConfig(compile_mode=name), "cpu")
    needing = [{"compile_mode": name} for name, mode in COMPILE_MODES.items() if mode.graphs]
    for values in (*needing, {"fusion": "layers"}):
        check_device(CBSyncConfig(**values), "cuda")
        ((name, value),) = values.items()
        message = f"{name}='{value}' needs a CUDA device, and the model is on cpu: .*'eager'"
        with pytest.raises(EngineError, match=message):
            check_device(CBSyncConfig(**values), "cpu")


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"fusion": "all"}, ValueError, f"fusion='all' {NO_CHOICE}"),
        ({"eos_token_id": VOCAB_SIZE}, ValueError, "eos_token_id 97"),
        ({"pad_token_id": -5}, ValueError, "pad_token_id -5"),
        ({"compile_mode": "cuda_graph"}, EngineError, "needs a CUDA device"),
        ({"attn_implementation": "eager"}, EngineError, "neither the engine's own .* loaded with .'sdpa'"),
    ],
)
def test_a_driver_checks_its_settings(shared_model, make_driver, settings, error, message):
    with pytest.raises(error, match=message):
        make_driver(shared_model("qwen3"), **settings)


def test_configs_of_another_type_are_refused(shared_model):
    with pytest.raises(TypeError, match=r"pass a GenerationConfig|the third argument"):
        SyncCBDriver(shared_model("qwen3"), CBSyncConfig())
    with pytest.raises(TypeError, match="pass a CBSyncConfig"):
        SyncCBDriver(shared_model("qwen3"), None, {"eos_token_id": 5})


# What is recorded


def test_resolved_settings_are_plain_json_and_what_runs(shared_model, make_driver):
    settings = {"num_blocks": 40, "eos_token_id": 7, "pad_token_id": 0, "scheduler": "prefill_first"}
    settings |= {"max_batch_tokens": 6}  # of which each request in a batch takes one
    resolved = make_driver(shared_model("llama"), **settings).resolved
    assert json.loads(json.dumps(resolved)) == resolved
    assert resolved | {"transformers": ""} == {
        "transformers": "",
        "model_class": "LlamaForCausalLM",
        "attn_implementation": "cbexp",
        "dtype": "float32",
        "device": "cpu",
        "sampling": {
            "temperature": 0.0,
            "top_k": 0,
            "top_p": 1.0,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "min_new_tokens": 0,
            "stop_token_ids": [],
            "stop_strings": [],
            "suppress_token_ids": [],
        },
        "max_new_tokens": 12,
        "eos_token_ids": [7],
        "pad_token_id": 0,
        "unused_model_defaults": {},
        "has_growing_cache": False,
        "page_size": 8,
        "num_blocks": 40,
        "cache_tokens": 320,
        # Keys and values, two layers, two heads of 8 in fp32: 256 bytes a token; two trash sectors of one block each.
        "cache_bytes": 256 * 8 * (40 + 2),
        "max_batch_tokens": 6,
        "max_requests_per_batch": 6,
        "max_blocks_per_request": 0,
        "decode_fast_path": False,
        "block_sharing": False,
        "scheduler": "prefill_first",
        "async_batching": False,
        "cuda_graph": False,
        "compile_mode": None,
        "cpu_offload_gib": 0.0,
        "decode_mode": "eager",
        "fusion": "none",
        "batch_shape": "buckets",
        "buckets": [1, 2, 4, 6],
        "max_burst": 128,
        "prefill_attention": "per_sequence",
        "self_check": False,  # nothing to check: the steps are the reference
        "self_check_results": [],
    }


@pytest.mark.parametrize(
    ("family", "asked", "is_shared", "has_warning"),
    [("qwen3", True, True, False), ("mistral", True, False, True), ("mistral", False, False, False)],
)
def test_block_sharing_is_recorded_as_it_runs(shared_model, recwarn, family, asked, is_shared, has_warning):
    """Models with sliding windows cannot share; whoever asks for it is warned."""
    config = CBSyncConfig(page_size=8, num_blocks=40, allow_block_sharing=asked)
    with SyncCBDriver(shared_model(family), config=config) as driver:
        assert driver.resolved["block_sharing"] is is_shared
    warned = [(str(warning.message).split(" with")[0], warning.filename) for warning in recwarn]
    assert warned == [("allow_block_sharing=True has no effect", __file__)] * has_warning
