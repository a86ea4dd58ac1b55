"""Models, the reference that they are compared with, and drivers that get closed."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, PreTrainedModel

from cbexp.engine import CBSyncConfig, SyncCBDriver
from tests.engine.driving import check_cache_at_rest, drive
from tests.engine.models import PROMPT_LENGTHS, build_model, generate_greedily, random_prompts
from tests.engine.ulps import exact_linear

torch.set_num_threads(1)


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
def check_drive(shared_model, make_driver, references) -> Callable[..., SyncCBDriver]:
    """Drive prompts on a family's shared model: the tokens are those of `generate`. Returns the driver.

    That is `driver`, or a new one with `settings`.
    """

    def check(family, prompts, limits=12, eos=(), num_generations=1, driver=None, **settings):
        if driver is None:
            driver = make_driver(shared_model(family), eos_token_id=eos, **settings)
        tokens = drive(driver, prompts, max_new_tokens=limits, num_generations=num_generations)
        assert tokens == references(family, prompts, limits, eos, num_generations)
        return driver

    return check


@pytest.fixture(scope="module")
def exact_fp32() -> Iterator[None]:
    """TF32 would round two sides differently on a GPU; for the module, since programs are bound to it."""
    allowed = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = allowed


@pytest.fixture
def exact_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """References and models take `exact_linear` for their matrix products.

    What is left of half precision are single sums and products, which IEEE 754 defines.
    """
    monkeypatch.setattr(torch.nn.functional, "linear", exact_linear)


@pytest.fixture
def make_driver_anywhere(
    make_driver: Callable[..., SyncCBDriver], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., SyncCBDriver]:
    """Users are told to use fused layers on CUDA alone; plain torch computes the same."""
    monkeypatch.setattr("cbexp.engine.driver.check_device", lambda config, device_type: None)
    return make_driver
