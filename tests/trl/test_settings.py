"""What `GRPOConfig` means to the engine, and what is refused by name, as is another version of TRL."""

import json

import pytest
from trl import GRPOConfig

from cbexp.engine import CBSyncConfig, EngineError, Sampling
from cbexp.trl import UnsupportedTrlError
from cbexp.trl.settings import build_engine_config, check_arguments, read_sampling
from cbexp.trl.support import check_trl_version
from tests.trl.trainers import load_model


@pytest.mark.parametrize("version", ["1.16.0", "1.16.3", "1.16.0.dev0"])
def test_supported_versions_pass(version):
    check_trl_version(version)


@pytest.mark.parametrize(
    ("version", "said"),
    [
        ("1.15.2", "trl 1.15.2 is not supported: install trl>=1.16,<1.17."),
        ("1.17.0", "trl 1.17.0 is not supported: install trl>=1.16,<1.17."),
        ("unknown", "trl unknown is not supported"),
        (None, "trl is not installed: pip install 'cbexp[trl]'"),
    ],
)
def test_another_version_is_refused_by_name(version, said):
    with pytest.raises(UnsupportedTrlError) as refusal:
        check_trl_version(version)
    assert str(refusal.value).startswith(said)


def build_args(**settings):
    return GRPOConfig("unused", bf16=False, use_cpu=True, report_to="none", **settings)


def test_sampling_follows_from_the_arguments():
    assert read_sampling(build_args()) == Sampling(temperature=1.0)
    kwargs = {"stop_strings": "\n\n", "suppress_tokens": [3], "min_new_tokens": 2}
    args = build_args(
        temperature=0.7,
        top_k=50,
        top_p=0.9,
        min_p=0.1,
        repetition_penalty=1.1,
        generation_kwargs=json.dumps(kwargs),
    )
    assert read_sampling(args) == Sampling(
        temperature=0.7,
        top_k=50,
        top_p=0.9,
        min_p=0.1,
        repetition_penalty=1.1,
        min_new_tokens=2,
        stop_strings=("\n\n",),
        suppress_token_ids=[3],
    )


def test_the_engine_gets_its_own_settings_and_those_of_the_trainer():
    args = build_args(max_completion_length=33, seed=7, cast_lm_head_to_fp32=True)
    config = build_engine_config(args, CBSyncConfig(num_blocks=9), True, [257, 3], 258, load_model())
    assert config == CBSyncConfig(
        num_blocks=9,
        max_new_tokens=33,
        eos_token_id=[257, 3],
        pad_token_id=258,
        sampling=Sampling(temperature=1.0),
        seed=7,
        logprobs=True,
        fp32_head=True,
    )
    config = build_engine_config(args, None, False, [257], 258, load_model())
    assert (config.allow_block_sharing, config.compile_mode, config.logprobs) == (True, "eager", False)


@pytest.mark.parametrize(
    ("settings", "own", "said"),
    [
        ({"use_vllm": True}, {}, "use_vllm=True has no effect: the engine generates"),
        (
            {"use_transformers_continuous_batching": True},
            {},
            "use_transformers_continuous_batching=True has no",
        ),
        ({"cache_implementation": "static"}, {}, "cache_implementation='static' has no effect"),
        ({"generation_kwargs": {"num_beams": 4}}, {}, "generation_kwargs['num_beams']=4 is not supported"),
        ({"generation_kwargs": {"top_k": 5}}, {}, "generation_kwargs['top_k']=5: set GRPOConfig.top_k"),
        ({"generation_kwargs": {"max_new_tokens": 5}}, {}, "set GRPOConfig.max_completion_length"),
        ({"generation_kwargs": {"eos_token_id": 5}}, {}, "of the model's generation config, which TRL reads"),
        (
            {"vllm_importance_sampling_correction": False},
            {"correction": True},
            "vllm_importance_sampling_correction=False exclude each other",
        ),
        (
            {"loss_type": "vespo"},
            {"correction": True},
            "loss_type='vespo' needs vllm_importance_sampling_mode 'token_truncate'",
        ),
        ({}, {"engine_config": CBSyncConfig(seed=3)}, "engine_config.seed follows from GRPOConfig.seed"),
        (
            {},
            {"engine_config": CBSyncConfig(logprobs=True)},
            "engine_config.logprobs follows from correction and num_r",
        ),
    ],
)
def test_what_has_no_effect_or_is_not_done_is_refused_by_name(settings, own, said):
    with pytest.raises(EngineError) as refusal:
        check_arguments(build_args(**settings), **{"engine_config": None, "correction": False} | own)
    assert said in str(refusal.value)
