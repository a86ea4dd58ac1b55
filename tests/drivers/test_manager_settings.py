"""How our settings become those of upstream's manager."""

from __future__ import annotations

import pytest
import torch
from transformers import Gemma2Config, Gemma2ForCausalLM, MistralConfig, Qwen3Config

from cbexp.drivers.manager_settings import build_batching_config
from cbexp.engine.types import UnsupportedModelError
from tests.drivers.conftest import make_config

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


@pytest.mark.parametrize(
    ("longest", "changes", "width"),
    [
        (812, {"page_size": 256, "num_blocks": 1000}, 6),  # 4 blocks, one more, made even
        (1100, {"page_size": 256, "num_blocks": 1000}, 6),
        (None, {"num_blocks": 20}, 22),  # the whole cache: 20 blocks
        (None, {"num_blocks": 10**6}, 130),  # the model's 2048 positions: 128 blocks
    ],
)
def test_the_block_table_fits_the_longest_request(longest, changes, width):
    config = model_config("flash_attention_2", max_position_embeddings=2048)
    settings = build_batching_config(make_config(**changes), config, CUDA, longest)
    assert settings.max_blocks_per_request == width


def test_sliding_windows_have_no_block_table():
    config = model_config("flash_attention_2", kind=MistralConfig, sliding_window=64)
    assert build_batching_config(make_config(), config, CUDA).max_blocks_per_request == 0
    config = model_config("flash_attention_2", kind=Gemma2Config)
    assert build_batching_config(make_config(), config, CUDA).max_blocks_per_request == 0


def test_requests_of_a_batch_are_no_more_than_can_be_active():
    def max_requests(**changes):
        return build_batching_config(make_config(**changes), model_config(), CPU).max_requests_per_batch

    assert max_requests(num_blocks=40) == 40
    assert max_requests(num_blocks=10**5, max_batch_tokens=8192) == 1024
    assert max_requests(max_requests_per_batch=7) == 7


def test_eager_attention_with_a_soft_cap_is_refused(make_manager):
    config = Gemma2Config(
        vocab_size=97, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4
    )
    config._attn_implementation = "eager"
    with pytest.raises(UnsupportedModelError, match=r"gemma2 .* leaves out the soft cap"):
        make_manager(Gemma2ForCausalLM(config))


def test_what_runs_is_what_is_recorded(make_manager, qwen3):
    driver = make_manager(qwen3, max_batch_tokens=100, max_requests_per_batch=None)
    driver.add_requests([[1, 2, 3]])
    driver.drive_until_empty()
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
