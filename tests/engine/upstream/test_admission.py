"""What the engine makes of transformers' schedulers: batches of prompts alone, in slots, without evicting."""

import pytest

from tests.engine.upstream.processors import run_step, submit


@pytest.fixture(params=["fifo", "prefill_first"])
def start(request, make_processor, shared_model):
    """A processor in which requests "d0", "d1", ... decode, each with a prompt of 8 tokens, one page."""

    def start(num_decoding, num_slots=8, admission="prefill_only", safety_margin=0.0, **changes):
        processor = make_processor(scheduler=request.param, **changes)
        scheduler, decoding = processor.scheduler, [f"d{index}" for index in range(num_decoding)]
        wait(processor, **dict.fromkeys(decoding, 8))
        if decoding:
            assert run_step(processor, shared_model("qwen3"))
        assert list(scheduler.decoding_requests()) == decoding
        scheduler.admission, scheduler.num_slots = admission, num_slots
        scheduler.safety_margin = safety_margin
        return processor

    return start


def wait(processor, **lengths):
    """Requests of that many tokens; a tuple has the number of forks beside it."""
    for request_id, length in lengths.items():
        length, num_children = length if isinstance(length, tuple) else (length, 0)
        submit(processor, request_id, range(length), max_new_tokens=50, num_children=num_children)


def schedule(processor):
    """The requests and the tokens of the next batch; None: nothing fits in the cache."""
    batch, _, num_tokens, _ = processor.scheduler.schedule_batch(64, processor.cache.max_tokens_read)
    return batch if batch is None else ([future.state.request_id for future in batch], num_tokens)


@pytest.mark.parametrize(
    ("num_decoding", "settings", "waiting", "batch", "still_waiting"),
    [
        # Of prompts alone, as many as slots are free; forks take one each, and nobody overtakes.
        (3, {}, {"a": 5, "b": 6}, (["a", "b"], 11), ""),
        (3, {"num_slots": 5}, {"a": 4, "b": 4, "c": 4}, (["a", "b"], 8), "c"),
        (2, {"num_slots": 6}, {"a": (4, 2), "b": (4, 1), "c": 4}, (["a"], 3), "bc"),
        # A group that is larger than the slots goes alone.
        (0, {"num_slots": 2}, {"a": (4, 4), "b": 4}, (["a"], 3), "b"),
        # Without room for it nobody is evicted while something decodes; else transformers hears of it.
        (2, {"num_blocks": 3}, {"a": 20}, ([], 0), "a"),
        (0, {"num_blocks": 3}, {"a": 60}, None, "a"),
        # Four of eight blocks are free.
        (4, {"num_blocks": 8, "safety_margin": 0.75}, {"a": 4}, ([], 0), "a"),
        (4, {"num_blocks": 8, "safety_margin": 0.5}, {"a": 4}, (["a"], 4), ""),
        # Batches of what decodes admit nobody, or whom there is a slot for.
        (2, {"admission": "closed"}, {"a": 4}, (["d0", "d1"], 2), "a"),
        (2, {"admission": "upstream", "num_slots": 3}, {"a": 4, "b": 4}, (["d0", "d1", "a"], 6), "b"),
    ],
)
def test_a_batch(start, num_decoding, settings, waiting, batch, still_waiting):
    processor = start(num_decoding, **settings)
    scheduler = processor.scheduler
    wait(processor, **waiting)
    assert schedule(processor) == batch
    assert "".join(scheduler.waiting_requests) == still_waiting
    admitted = [request_id for request_id in waiting if request_id not in still_waiting]
    # What decodes is still there, and first.
    assert list(scheduler.active_requests) == [*(f"d{i}" for i in range(num_decoding)), *admitted]
    if batch == ([], 0):
        assert processor.prepare_next_batch() is False
        assert not scheduler.block_new_requests


def read_chunk(processor, num_tokens=10):
    batch, _, num_tokens, _ = processor.scheduler.schedule_batch(num_tokens, 1000)
    for future in batch:  # what `prepare_batch_tensors` does
        future.state.position_offset += future.query_length
    return [future.state.request_id for future in batch], num_tokens


def test_nobody_is_evicted_for_a_prompt_that_cannot_go_on(start):
    """Transformers would see it as starved, and evict for it beside the next batch."""
    processor = start(1, num_blocks=4)
    wait(processor, long=40, b=4)
    assert read_chunk(processor) == (["long"], 10)
    assert schedule(processor) == (["b"], 4)
    assert processor.scheduler.starved_requests == []


def test_prompts_to_read_are_those_begun_and_those_that_may_be_admitted(start):
    processor = start(1, num_slots=3, max_batch_tokens=10)
    wait(processor, long=25, b=4, c=4)
    for batch in ((["long"], 10), (["long"], 10), (["long", "b"], 9)):
        assert processor.scheduler.has_prefill_candidates()
        assert read_chunk(processor) == batch
    assert not processor.scheduler.has_prefill_candidates()
    processor.scheduler.num_slots = 4
    assert processor.scheduler.has_prefill_candidates()
    processor.scheduler.block_new_requests = True
    assert not processor.scheduler.has_prefill_candidates()
