"""Tiny random models of every shape that matters, the reference they are compared with, and drivers that get closed."""

from __future__ import annotations

import functools
import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GenerationConfig,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from cbexp.engine import CBSyncConfig, SyncCBDriver
from tests.engine.driving import check_cache_at_rest
from tests.engine.ulps import exact_linear

torch.set_num_threads(1)

VOCAB_SIZE = 97
SHAPE = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    # Tied random weights make a model repeat its last token.
    "tie_word_embeddings": False,
}
FAMILIES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {}),
    "llama": (LlamaForCausalLM, LlamaConfig, {"attn_implementation": "eager"}),
    # A soft cap low enough to bend every attention score, and a window shorter than most prompts.
    "gemma2": (
        Gemma2ForCausalLM,
        Gemma2Config,
        {"sliding_window": 16, "attn_logit_softcapping": 1.0, "query_pre_attn_scalar": 8},
    ),
    # Four sliding layers to one full layer: their blocks differ in size, so sectors hold several.
    "gemma3": (
        Gemma3ForCausalLM,
        Gemma3TextConfig,
        {
            "sliding_window": 16,
            "num_hidden_layers": 5,
            "layer_types": ["sliding_attention"] * 4 + ["full_attention"],
        },
    ),
    "mistral": (MistralForCausalLM, MistralConfig, {"sliding_window": 12}),
    # Attention sinks, experts, sliding and full layers.
    "gpt_oss": (
        GptOssForCausalLM,
        GptOssConfig,
        {"sliding_window": 8, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "qwen3_moe": (
        Qwen3MoeForCausalLM,
        Qwen3MoeConfig,
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    ),
}
PROMPT_LENGTHS = (1, 2, 7, 16, 17, 40, 63)


def build_model(family: str, **changes: Any) -> PreTrainedModel:
    """A random model whose completions differ from prompt to prompt; transformers' own init is too flat for that."""
    model_class, config_class, values = FAMILIES[family]
    torch.manual_seed(0)
    model = model_class._from_config(config_class(**(SHAPE | values | changes)))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 or name.endswith("sinks"):
                parameter.normal_(std=0.3, generator=generator)
    return model.eval()


def random_prompts(lengths: Sequence[int], seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(VOCAB_SIZE) for _ in range(length)] for length in lengths]


@torch.no_grad()
def generate_greedily(
    model: PreTrainedModel, prompt_ids: Sequence[int], max_new_tokens: int, eos_token_ids: Sequence[int] = ()
) -> tuple[int, ...]:
    """The reference: `generate` of one prompt, with a mask; the pad id is only ever written after an end."""
    input_ids = torch.tensor([prompt_ids], device=model.device)
    config = GenerationConfig(
        max_new_tokens=max_new_tokens,
        do_sample=False,
        eos_token_id=list(eos_token_ids) or None,
        pad_token_id=0,
    )
    output = model.generate(input_ids, attention_mask=torch.ones_like(input_ids), generation_config=config)
    return tuple(output[0, len(prompt_ids) :].tolist())


@pytest.fixture(scope="session")
def shared_model() -> Callable[[str], PreTrainedModel]:
    """One model per family for the whole session, for tests that leave it as it is."""
    return functools.cache(build_model)


@pytest.fixture(scope="session")
def new_model() -> Callable[..., PreTrainedModel]:
    return build_model


@pytest.fixture(scope="session")
def prompts() -> list[list[int]]:
    """One prompt of each length of interest: a single token, a page and its neighbours, beyond every window."""
    return random_prompts(PROMPT_LENGTHS)


@pytest.fixture(scope="session")
def make_prompts() -> Callable[..., list[list[int]]]:
    return random_prompts


@pytest.fixture(scope="session")
def greedy() -> Callable[..., tuple[int, ...]]:
    return generate_greedily


@pytest.fixture(scope="session")
def reference(shared_model: Callable[[str], PreTrainedModel]) -> Callable[..., tuple[int, ...]]:
    """(family, prompt, max_new_tokens, eos ids) -> tokens of `generate` on the family's shared model."""

    @functools.cache
    def cached(family: str, prompt: tuple[int, ...], limit: int, eos: tuple[int, ...]) -> tuple[int, ...]:
        return generate_greedily(shared_model(family), prompt, limit, eos)

    return lambda family, prompt, limit, eos=(): cached(family, tuple(prompt), limit, tuple(eos))


@pytest.fixture(scope="session")
def references(reference: Callable[..., tuple[int, ...]]) -> Callable[..., list[tuple[int, ...]]]:
    """(family, prompts, limit of all or one each, eos ids, generations) -> what a drive of them returns."""

    def listed(family, prompts, limits=12, eos=(), num_generations=1):
        limits = [limits] * len(prompts) if isinstance(limits, int) else limits
        tokens = [
            reference(family, prompt, limit, eos) for prompt, limit in zip(prompts, limits, strict=True)
        ]
        return [completion for completion in tokens for _ in range(num_generations)]

    return listed


@pytest.fixture
def make_driver() -> Iterator[Callable[..., SyncCBDriver]]:
    """`SyncCBDriver` with small pages and batches. After the test its cache is looked at, and it is closed."""
    drivers: list[SyncCBDriver] = []

    def make(model: Any, generation_config: GenerationConfig | None = None, **changes: Any) -> SyncCBDriver:
        settings: dict[str, Any] = {"max_new_tokens": 12, "page_size": 8, "max_batch_tokens": 256} | changes
        with warnings.catch_warnings():
            # Tests go over families and settings alike.
            warnings.filterwarnings("ignore", "allow_block_sharing=True has no effect")
            drivers.append(SyncCBDriver(model, generation_config, CBSyncConfig(**settings)))
        return drivers[-1]

    yield make
    for driver in drivers:
        check_cache_at_rest(driver)
        driver.close()


@pytest.fixture
def exact_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """References and models take `exact_linear` for their matrix products.

    What is left of half precision are single sums and products, which IEEE 754 defines.
    """
    monkeypatch.setattr(torch.nn.functional, "linear", exact_linear)


@pytest.fixture
def exact_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    """TF32 would round the two sides of a comparison differently."""
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)


@pytest.fixture
def make_driver_anywhere(
    make_driver: Callable[..., SyncCBDriver], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., SyncCBDriver]:
    """Users are told to use fused layers on CUDA alone; plain torch computes the same."""
    monkeypatch.setattr("cbexp.engine.driver.check_device", lambda config, device_type: None)
    return make_driver
