"""How our settings become those of upstream's manager."""

import pytest
import torch
from transformers import Gemma2Config, Gemma2ForCausalLM, MistralConfig, Qwen3Config

from cbexp.drivers.manager_settings import build_batching_config
from cbexp.engine.types import EngineError, UnsupportedModelError
from tests.drivers.conftest import drive, make_config

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


def model_config(attention="sdpa", kind=Qwen3Config, **kwargs):
    config = kind(num_hidden_layers=2, **kwargs)
    config._attn_implementation = attention
    return config


@pytest.mark.parametrize(
    ("mode", "graph", "is_async", "level", "torch_mode"),
    [
        ("eager", False, False, 0, None),
        ("default", False, False, 1, None),
        ("max_autotune_no_cudagraphs", False, False, 2, None),
        ("cuda_graph", True, True, 0, None),
        ("compiled_cuda_graph", True, True, 1, None),
        ("reduce_overhead", False, False, 0, "reduce-overhead"),
        ("max_autotune", False, False, 0, "max-autotune"),
    ],
)
def test_compile_modes_with_flash_attention_on_cuda(mode, graph, is_async, level, torch_mode):
    settings = build_batching_config(make_config(compile_mode=mode), model_config("flash_attention_3"), CUDA)
    assert settings.use_cuda_graph is graph
    assert settings.use_async_batching is is_async
    assert settings.default_compile_level == level
    for compile_config in (settings.varlen_compile_config, settings.decode_compile_config):
        assert (None if compile_config is None else compile_config.mode) == torch_mode
    assert settings.max_blocks_per_request > 0
    assert settings.auto_switch_to_flash is False


def test_masks_and_asynchronous_batching_do_not_go_together():
    settings = build_batching_config(make_config(compile_mode="reduce_overhead"), model_config(), CUDA)
    # Without the fast path upstream would ignore it, with a warning.
    assert settings.decode_compile_config is None
    settings = build_batching_config(make_config(compile_mode="cuda_graph"), model_config(), CUDA)
    assert (settings.use_cuda_graph, settings.use_async_batching) == (True, False)
    assert settings.max_blocks_per_request == 0
    with pytest.raises(EngineError, match="compile_mode='cuda_graph' needs a CUDA device"):
        build_batching_config(make_config(compile_mode="cuda_graph"), model_config(), CPU)


@pytest.mark.parametrize(
    ("kind", "longest", "changes", "width"),
    [
        (Qwen3Config, 812, {"page_size": 256, "num_blocks": 1000}, 6),  # 4 blocks, one more, made even
        (Qwen3Config, None, {"num_blocks": 20}, 22),  # the whole cache: 20 blocks
        (Qwen3Config, None, {"num_blocks": 10**6}, 130),  # the model's 2048 positions: 128 blocks
        (MistralConfig, None, {}, 0),  # sliding windows have none
    ],
)
def test_the_block_table_fits_the_longest_request(kind, longest, changes, width):
    config = model_config("flash_attention_2", kind, max_position_embeddings=2048)
    settings = build_batching_config(make_config(**changes), config, CUDA, longest)
    assert settings.max_blocks_per_request == width


def test_eager_attention_with_a_soft_cap_is_refused(make_manager):
    sizes = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}
    config = model_config("eager", Gemma2Config, **sizes)
    with pytest.raises(UnsupportedModelError, match=r"gemma2 .* leaves out the soft cap"):
        make_manager(Gemma2ForCausalLM(config))


def test_what_runs_is_what_is_recorded(make_manager, qwen3):
    driver = make_manager(qwen3, max_batch_tokens=100, max_requests_per_batch=None)
    drive(driver, [[1, 2, 3]])
    expected = {
        "attn_implementation": "sdpa",
        "compile_mode": "eager",
        "page_size": 16,
        "num_blocks": 64,
        "max_batch_tokens": 100,
        "max_requests_per_batch": 64,
        "decode_fast_path": False,
        "block_sharing": False,
        "async_batching": False,
        "cuda_graph": False,
        "varlen_compile": None,
        "safety_margin": 0.0,
        "max_request_tokens": 1024,
    }
    before_close = driver.resolved
    driver.close()
    assert {key: driver.resolved[key] for key in expected} == expected
    assert driver.resolved == before_close
