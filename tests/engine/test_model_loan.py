"""One thread at a time has the model; others are refused before anything of it is changed."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from cbexp.engine import EngineError

NUM_NEW = 12
REFUSED = "Qwen3ForCausalLM is on loan to a driver in another thread"


def in_another_thread(function, *args):
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function, *args).result()


def state(model):
    return (
        [module.training for module in model.modules()],
        model.config._attn_implementation,
        ["forward" in vars(module) for module in model.modules()],
        [parameter.data_ptr() for parameter in model.parameters()],
    )


def tokens(driver):
    return [completion.completion_ids for completion in driver.drive_until_empty().values()]


@pytest.fixture
def expected(prompts, reference):
    return [reference("qwen3", prompt, NUM_NEW) for prompt in prompts]


@pytest.mark.parametrize("use", ["drive", "warmup", "time", "construct"])
@pytest.mark.parametrize("fusion", ["none", "projections"])
def test_another_thread_is_refused_with_nothing_changed(
    new_model, make_driver, prompts, expected, use, fusion
):
    model = new_model("qwen3").train()
    other = make_driver(model, num_blocks=64, fusion=fusion)
    other.add_requests(prompts)
    uses = {
        "drive": other.drive_until_empty,
        "warmup": other.warmup,
        "time": lambda: other.time_decode_steps(1, 8, 4),
        "construct": lambda: make_driver(model),
    }
    inside, errors = [], []

    def interfere(index, info):
        if not inside:
            inside.append(state(model))
            with pytest.raises(EngineError, match=REFUSED) as error:
                in_another_thread(uses[use])
            errors.append(error)
            inside.append(state(model))

    driver = make_driver(model, fusion=fusion, on_step=interfere)
    before = state(model)
    driver.add_requests(prompts)
    assert tokens(driver) == expected
    assert len(errors) == 1
    assert inside[0] == inside[1]
    assert state(model)[:3] == before[:3]
    assert tokens(other) == expected  # what it had queued was kept


def test_closing_waits_for_the_drive_of_another_thread(new_model, make_driver, prompts, expected):
    """It gives weights storage of their own, which captured graphs would not follow."""
    model = new_model("qwen3")
    other = make_driver(model, fusion="projections")
    other.add_requests(prompts)
    assert tokens(other) == expected
    seen = []

    def interfere(index, info):
        with pytest.raises(EngineError, match=REFUSED):
            in_another_thread(other.close)
        seen.append(state(model))

    driver = make_driver(model, fusion="projections", on_step=interfere)
    driver.add_requests(prompts)
    assert tokens(driver) == expected
    assert all(one == seen[0] for one in seen)
    addresses = [parameter.data_ptr() for parameter in model.parameters()]
    driver.close()
    other.close()
    assert addresses != [parameter.data_ptr() for parameter in model.parameters()]


def test_drives_of_many_threads_on_one_model(new_model, make_driver, prompts, expected):
    """Each is served or refused; none is wrong, and the model comes back as it was."""
    model = new_model("qwen3").train()
    drivers = [make_driver(model, fusion="projections") for _ in range(3)]
    before = state(model)[:3]
    start = threading.Barrier(len(drivers))
    outcomes = []

    def drive(driver):
        num_queued = 0
        start.wait()
        for _ in range(8):
            driver.add_requests(prompts)
            num_queued += 1
            try:
                outcomes.append(tokens(driver) == expected * num_queued)
                num_queued = 0
            except EngineError as error:
                outcomes.append(REFUSED in str(error))

    with ThreadPoolExecutor(len(drivers)) as pool:
        list(pool.map(drive, drivers))
    assert len(outcomes) == 24
    assert all(outcomes)
    assert state(model)[:3] == before


def test_a_drive_inside_a_drive_of_the_same_thread(new_model, make_driver, prompts, expected):
    model = new_model("qwen3")
    inner = make_driver(model)
    seen = []

    def nest(index, info):
        if not seen:
            inner.add_requests(prompts)
            seen.append(tokens(inner))
            # The outer drive still has the model.
            inner.add_requests(prompts)
            with pytest.raises(EngineError, match=REFUSED):
                in_another_thread(inner.drive_until_empty)

    outer = make_driver(model, on_step=nest)
    outer.add_requests(prompts)
    assert tokens(outer) == expected
    assert seen == [expected]


def test_another_thread_has_its_turn_afterwards(new_model, make_driver, prompts, expected):
    model = new_model("qwen3")

    def fail(index, info):
        raise ArithmeticError

    failing = make_driver(model, on_step=fail)
    failing.add_requests(prompts)
    with pytest.raises(ArithmeticError):
        failing.drive_until_empty()
    driver = make_driver(model)
    driver.add_requests(prompts)
    assert in_another_thread(tokens, driver) == expected
    driver.add_requests(prompts)
    assert tokens(driver) == expected
