"""What the engine makes of transformers' schedulers: batches of prompts alone, in slots, without evicting."""

import pytest

from cbexp.engine.upstream.admission import is_decoding
from tests.engine.upstream.processors import run_step, submit


@pytest.fixture(params=["fifo", "prefill_first"])
def start(request, make_processor, shared_model):
    """A processor in which requests "d0", "d1", ... decode, each with a prompt of 8 tokens, one page."""

    def start(num_decoding, num_slots=8, **changes):
        processor = make_processor(scheduler=request.param, **changes)
        scheduler = processor.scheduler
        for index in range(num_decoding):
            wait(processor, f"d{index}", 8)
        if num_decoding:
            assert run_step(processor, shared_model("qwen3"))
        assert list(scheduler.decoding_requests()) == [f"d{i}" for i in range(num_decoding)]
        scheduler.admission, scheduler.num_slots = "prefill_only", num_slots
        return processor

    return start


def wait(processor, request_id, length, num_children=0):
    submit(processor, request_id, range(length), max_new_tokens=50, num_children=num_children)


def schedule(processor):
    batch, _, num_tokens, _ = processor.scheduler.schedule_batch(64, processor.cache.max_tokens_read)
    return batch if batch is None else ([future.state.request_id for future in batch], num_tokens)


def test_a_batch_of_prompts_alone(start):
    processor = start(3)
    wait(processor, "a", 5)
    wait(processor, "b", 6)
    assert schedule(processor) == (["a", "b"], 11)
    # What decodes is still there, and first.
    assert list(processor.scheduler.active_requests) == ["d0", "d1", "d2", "a", "b"]
    assert all(is_decoding(state) for state in processor.scheduler.active_requests.values())


def test_what_decodes_comes_back_after_an_error(start, monkeypatch):
    processor = start(2)
    wait(processor, "a", 5)
    monkeypatch.setattr(processor.cache, "can_store_request_tokens", None)
    with pytest.raises(TypeError):
        schedule(processor)
    assert list(processor.scheduler.active_requests) == ["d0", "d1"]


def test_no_more_than_the_free_slots(start):
    processor = start(3, num_slots=5)
    for request_id in "abc":
        wait(processor, request_id, 4)
    assert schedule(processor) == (["a", "b"], 8)
    assert not processor.scheduler.has_prefill_candidates()
    assert schedule(processor) == ([], 0)
    assert list(processor.scheduler.waiting_requests) == ["c"]


def test_forks_take_a_slot_each_and_nobody_overtakes(start):
    processor = start(2, num_slots=6)
    wait(processor, "a", 4, num_children=2)
    wait(processor, "b", 4, num_children=1)
    wait(processor, "c", 4)
    assert schedule(processor)[0] == ["a"]
    assert list(processor.scheduler.waiting_requests) == ["b", "c"]


def test_a_group_larger_than_the_slots_goes_alone(start):
    processor = start(0, num_slots=2)
    wait(processor, "a", 4, num_children=4)
    wait(processor, "b", 4)
    assert schedule(processor)[0] == ["a"]


def test_a_prompt_begun_goes_on_and_holds_its_slot(start):
    processor = start(1, num_slots=3, max_batch_tokens=10)
    for request_id, length in (("long", 25), ("b", 4), ("c", 4)):
        wait(processor, request_id, length)
    seen = []
    for _ in range(3):
        batch, _, num_tokens, _ = processor.scheduler.schedule_batch(10, 1000)
        seen.append(([future.state.request_id for future in batch], num_tokens))
        for future in batch:  # what `prepare_batch_tensors` does
            future.state.position_offset += future.query_length
        assert processor.scheduler.has_prefill_candidates() is (len(seen) < 3)
    assert seen == [(["long"], 10), (["long"], 10), (["long", "b"], 9)]


def test_no_room_evicts_nobody_while_something_decodes(start):
    processor = start(2, num_blocks=3)
    wait(processor, "a", 20)
    assert schedule(processor) == ([], 0)
    assert processor.prepare_next_batch() is False
    assert processor.scheduler.starved_requests == []
    assert list(processor.scheduler.active_requests) == ["d0", "d1"]
    assert not processor.scheduler.block_new_requests


def test_with_nothing_decoding_transformers_hears_of_it(start):
    processor = start(0, num_blocks=3)
    wait(processor, "a", 60)
    assert schedule(processor) is None


def test_outside_of_the_safety_margin_nobody_is_admitted(start):
    processor = start(4, num_blocks=8)
    wait(processor, "a", 4)
    processor.scheduler.safety_margin = 0.75
    assert schedule(processor) == ([], 0)
    processor.scheduler.safety_margin = 0.5
    assert schedule(processor) == (["a"], 4)


@pytest.mark.parametrize(
    ("admission", "batch"), [("closed", (["d0", "d1"], 2)), ("upstream", (["d0", "d1", "a"], 6))]
)
def test_batches_that_decode_admit_nobody_or_as_transformers_does(start, admission, batch):
    processor = start(2, num_slots=2)
    wait(processor, "a", 4)
    processor.scheduler.admission = admission
    assert schedule(processor) == batch
    assert ("a" in processor.scheduler.waiting_requests) is (admission == "closed")


def test_blocked_admission_is_no_candidate(start):
    processor = start(1)
    wait(processor, "a", 4)
    assert processor.scheduler.has_prefill_candidates()
    processor.scheduler.block_new_requests = True
    assert not processor.scheduler.has_prefill_candidates()
