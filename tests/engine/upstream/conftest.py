import pytest

from cbexp.engine.upstream.build import build_processor
from tests.engine.upstream.processors import settings_for


@pytest.fixture
def make_processor(shared_model):
    """(family, settings) -> transformers' processor with the engine's scheduler, on a cache of its own."""

    def make(family="qwen3", **changes):
        settings = settings_for(shared_model(family), **changes)
        processor = build_processor(shared_model(family), settings)
        processor.scheduler.num_slots = settings.max_requests_per_batch
        return processor

    return make
