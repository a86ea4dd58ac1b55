"""Float32 weights whose trainer computes under autocast: drives run on copies of them in the autocast's dtype."""

from __future__ import annotations

import gc
from pathlib import Path
from types import FunctionType

import accelerate
import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from transformers import AutoModelForCausalLM, AutoTokenizer

import cbexp
from cbexp.engine import CacheMemoryError, EngineError
from cbexp.engine.borrow import borrowed_for_inference
from cbexp.engine.shadow import Shadow
from tests.engine.driving import drive
from tests.engine.forward.models import build, in_half_precision, places, with_lora
from tests.engine.models import build_model

PROMPTS = [[3, 5, 7], [11], list(range(30, 50))]
BFLOAT16 = torch.bfloat16
TOKENS = torch.tensor([PROMPTS[2]])


def prepare(model, mixed_precision="bf16"):
    """As accelerate does for a trainer, on the outermost wrapper."""
    accelerator = accelerate.Accelerator(mixed_precision=mixed_precision, cpu=True)
    prepared = accelerator.prepare_model(model, evaluation_mode=True)
    accelerate.state.AcceleratorState._reset_state()
    return prepared


def decorate(model, dtype=BFLOAT16):
    model.forward = torch.autocast("cpu", dtype=dtype)(model.forward)
    return model


def values(model):
    return {name: (p.dtype, p.requires_grad, p.tolist()) for name, p in model.named_parameters()}


def train(model, optimizer):
    with torch.autocast("cpu", dtype=BFLOAT16):
        loss = model(input_ids=TOKENS, labels=TOKENS).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def log_probs(model, inputs, num_last):
    """Of each of the last tokens, [tokens, vocab_size]."""
    return model(input_ids=inputs, use_cache=False).logits[0, -num_last - 1 : -1].double().log_softmax(-1)


# What runs


@pytest.mark.parametrize(
    ("fusion", "adapt", "wrap", "dtype"),
    [
        ("layers", None, prepare, BFLOAT16),
        ("layers", None, lambda model: decorate(model, torch.float16), torch.float16),
        ("projections", with_lora, prepare, BFLOAT16),
        ("none", with_lora, decorate, BFLOAT16),
    ],
)
def test_a_drive_runs_as_on_half_precision_weights(make_driver_anywhere, fusion, adapt, wrap, dtype):
    """The masters are what they were, where they were; a tied weight is copied once."""
    model = build(tie_word_embeddings=fusion != "projections")
    wrapped = model if adapt is None else adapt(model)
    halved = in_half_precision(wrapped, dtype)
    wrapped = wrap(wrapped)
    before, where = values(model), places(model)
    driver = make_driver_anywhere(wrapped, fusion=fusion, num_blocks=32)
    assert drive(driver, PROMPTS) == drive(make_driver_anywhere(halved, fusion=fusion), PROMPTS)
    assert values(model) == before
    assert places(model) == where
    resolved = driver.resolved
    assert (resolved["dtype"], resolved["fusion"]) == (str(dtype).removeprefix("torch."), fusion)
    num_bytes = 2 * sum(p.numel() for p in model.parameters())
    assert num_bytes <= resolved["shadow_bytes"] < num_bytes + 256 * len(before)


def test_the_autocast_around_a_drive(make_driver, prompts):
    """It is the drive's that counts: with another one than before, the cache is built anew."""
    model = build_model("gemma2")
    driver, halved = make_driver(model, num_blocks=64), make_driver(in_half_precision(model))
    expected = drive(driver, prompts), drive(halved, prompts)
    with (
        torch.autocast("cpu", dtype=BFLOAT16),
        pytest.raises(EngineError, match=r"another dtype.*bfloat16, cpu"),
    ):
        driver.warmup()
    for is_on in (False, True, True, False):
        with torch.autocast("cpu", dtype=BFLOAT16, enabled=is_on):
            assert drive(driver, prompts) == expected[is_on]
            assert torch.is_autocast_enabled("cpu") == is_on
        assert driver.resolved["dtype"] == ("bfloat16" if is_on else "float32")
        assert (driver._shadow.dtype is None) == (not is_on)


@pytest.mark.parametrize(
    ("make", "dtype"),
    [
        (lambda: prepare(build().bfloat16()), "bfloat16"),
        # PEFT's default: the adapters are in float32.
        (lambda: prepare(with_lora(build().bfloat16())), "bfloat16"),
        (lambda: prepare(build().double()), "float64"),
        (build, "float32"),
        (lambda: prepare(build(), "no"), "float32"),
    ],
)
def test_no_copy_is_made(make_driver, make, dtype):
    driver = make_driver(make())
    drive(driver, PROMPTS[:1])
    assert driver._shadow.dtype is None
    assert driver.resolved["dtype"] == dtype
    assert "shadow_bytes" not in driver.resolved


def test_the_innermost_autocast_counts(make_driver):
    model = build()
    expected = drive(make_driver(model), PROMPTS)
    model.forward = torch.autocast("cpu", enabled=False)(model.forward)
    with torch.autocast("cpu", dtype=BFLOAT16):
        driver = make_driver(prepare(model))
        assert drive(driver, PROMPTS) == expected
    assert driver.resolved["dtype"] == "float32"


def test_what_transformers_keeps_in_float32_is_kept():
    """GPT-OSS keeps its norms so beside float16."""
    model = build_model("gpt_oss")
    wanted = {torch.float16: {torch.float16, torch.float32}, BFLOAT16: {BFLOAT16}}
    for dtype, dtypes in wanted.items():
        with (
            torch.autocast("cpu", dtype=dtype),
            borrowed_for_inference(model, "eager", Shadow(model, [model])),
        ):
            assert {parameter.dtype for parameter in model.parameters()} == dtypes
            assert model.model.layers[0].input_layernorm.weight.dtype == (
                torch.float32 if torch.float32 in dtypes else dtype
            )
            assert model.dtype == dtype


def cast_head(model):
    """As TRL's GRPO does with `cast_lm_head_to_fp32`, for a tied head."""
    head = model.lm_head

    def cast_forward_to_fp32(hidden):
        return torch.nn.functional.linear(hidden.float(), head.weight)

    def cast_outputs_to_original_dtype(module, args, output):
        return output.float()

    code, closure = cast_forward_to_fp32.__code__, cast_forward_to_fp32.__closure__
    names = {"__name__": "trl.trainer.grpo_trainer", "torch": torch}
    head.forward = FunctionType(code, names, closure=closure)
    model.model.embed_tokens.register_forward_hook(cast_outputs_to_original_dtype)


@torch.no_grad()
def test_a_head_that_trl_has_cast_to_float32(make_driver):
    """It has the masters, also where the embedding is the same weight and runs on a copy."""
    model = build(tie_word_embeddings=True)
    halved = in_half_precision(model)
    cast_head(model)
    driver = make_driver(prepare(model))
    drive(driver, PROMPTS)
    with borrowed_for_inference(model, "sdpa", driver._shadow):
        logits = model(input_ids=TOKENS, use_cache=False).logits
        assert (model.model.embed_tokens.weight.dtype, model.lm_head.weight.dtype) == (
            BFLOAT16,
            torch.float32,
        )
    hidden = halved.model(input_ids=TOKENS, use_cache=False).last_hidden_state
    assert torch.equal(logits, hidden.float() @ model.lm_head.weight.T)
    assert len(model.model.embed_tokens._forward_hooks) == 1


@torch.no_grad()
def test_log_probabilities_are_those_of_the_trainers_forward(make_driver):
    """Of a trained model. A token that the trainer's forward would not choose is nearly as likely there."""
    folder = Path(cbexp.__file__).parent / "assets" / "tiny"
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    questions = ["What is 12 plus 30?", "Take 5 away from 9.", "What is 7 times 8?", "Add 13 and 58."]
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=False
        )
        for question in questions
    ]
    prepare(model)
    driver = make_driver(model, eos_token_id=tokenizer.eos_token_id, max_new_tokens=32)
    differences, divergences, gaps = [], [], []
    for prompt, completion in zip(prompts, drive(driver, prompts), strict=True):
        inputs, chosen = torch.tensor([[*prompt, *completion]]), torch.tensor(completion)[:, None]

        trainers = log_probs(model, inputs, len(completion))
        with borrowed_for_inference(model, "sdpa", driver._shadow):
            ours = log_probs(model, inputs, len(completion))
        differences.append((trainers - ours).gather(1, chosen).abs())
        divergences.append((trainers.exp() * (trainers - ours)).sum(-1))
        gaps.append(trainers.max(-1, keepdim=True).values - trainers.gather(1, chosen))
    assert torch.cat(differences).mean() < 0.003
    assert torch.cat(divergences).mean() < 5e-4
    assert torch.cat(gaps).max() < 0.05


# Weights that change


@pytest.mark.parametrize(
    ("compile_mode", "fusion"),
    [("eager", "layers"), pytest.param("default", "projections", marks=pytest.mark.slow)],
)
def test_training_between_drives(make_driver_anywhere, monkeypatch, compile_mode, fusion):
    """Twenty optimizer steps: each next rollout is that of the new weights, and nothing is built anew."""
    model = build(num_hidden_layers=2)
    wrapped = with_lora(model) if fusion == "projections" else model
    prepare(wrapped).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    settings = {"compile_mode": compile_mode, "fusion": fusion, "num_blocks": 32, "buckets": (4,)}
    settings["max_new_tokens"] = 4
    driver = make_driver_anywhere(wrapped, **settings)
    seen, voids = [drive(driver, PROMPTS)], []
    choice = driver._engine.decoder._forward
    begin = choice.begin
    monkeypatch.setattr(choice, "begin", lambda **options: voids.append(begin(**options)) or voids[-1])
    copies = [p.data_ptr() for p in driver._shadow._copies]
    for step in range(20):
        train(wrapped, optimizer)
        assert wrapped.training
        seen.append(drive(driver, PROMPTS))
        if compile_mode == "eager" and step in (0, 19):
            reference = make_driver_anywhere(in_half_precision(model), fusion=fusion, max_new_tokens=4)
            assert drive(reference, PROMPTS) == seen[-1]
    assert voids == [False] * 20
    assert seen[0] != seen[1]
    assert [p.data_ptr() for p in driver._shadow._copies] == copies
    assert driver.compile_stats["recompiles"] == 0
    assert driver.compile_stats["programs"] == (compile_mode != "eager")


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["cuda_graph", "compiled_cuda_graph", "reduce_overhead"])
def test_graphs_stay_valid_over_training(make_driver, mode):
    model = build().cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    driver = make_driver(model, compile_mode=mode, fusion="layers", num_blocks=32, buckets=(4,))
    inputs, seen, memory, built = TOKENS.cuda(), [], [], []
    for _ in range(20):
        with torch.autocast("cuda", dtype=BFLOAT16):
            seen.append(drive(driver, PROMPTS))
            loss = model(input_ids=inputs, labels=inputs).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize()
        memory.append(torch.cuda.memory_allocated())
        stats = driver.compile_stats
        built.append([stats[name] for name in ("programs", "recompiles", "graphs", "compile_s", "capture_s")])
    assert seen[0] != seen[-1]
    assert built == built[:1] * 20
    assert memory[-1] == memory[2]
    reference = make_driver(in_half_precision(model), compile_mode=mode, fusion="layers", num_blocks=32)
    with torch.autocast("cuda", dtype=BFLOAT16):
        assert drive(driver, PROMPTS) == drive(reference, PROMPTS)


def test_writes_through_data_and_in_on_step_are_seen(make_driver):
    """Neither leaves a trace in a version counter; the caller has the masters in `on_step`."""
    model, changes, dtypes = prepare(build()), [], []

    def on_step(index, info):
        dtypes.append({p.dtype for p in model.parameters()})
        while changes:
            changes.pop()()

    def negate():
        for parameter in model.parameters():
            parameter.data.neg_()

    driver = make_driver(model, max_burst=2, on_step=on_step)
    before = drive(driver, PROMPTS)
    changes.append(negate)
    middle = drive(driver, PROMPTS)
    assert [tokens[:1] for tokens in middle] == [tokens[:1] for tokens in before]
    assert middle != before
    assert drive(driver, PROMPTS) == drive(make_driver(in_half_precision(model)), PROMPTS)
    assert set().union(*dtypes) == {torch.float32}
    for change, error in (
        (model.double, r"on_step has left the model on cpu in torch\.float64"),
        (lambda: model.to("meta"), "cannot be driven as it is now: its weights are on the meta device"),
    ):
        changes.append(change)
        with pytest.raises(EngineError, match=error):
            drive(driver, PROMPTS)
    assert {(p.dtype, p.is_meta) for p in model.parameters()} == {(torch.float64, True)}


def test_parameters_that_are_replaced(make_driver):
    model = prepare(build(num_hidden_layers=2))
    driver = make_driver(model)
    drive(driver, PROMPTS)
    for change in (
        lambda: model.load_state_dict({n: -t for n, t in model.state_dict().items()}, assign=True),
        lambda: model.resize_token_embeddings(120, mean_resizing=False),
        lambda: setattr(model.lm_head, "weight", model.model.embed_tokens.weight),
        lambda: with_lora(model),
    ):
        change()
        assert drive(driver, PROMPTS) == drive(make_driver(in_half_precision(model)), PROMPTS)
        assert {p.dtype for p in model.parameters()} == {torch.float32}


# Memory


@pytest.mark.parametrize("end", ["close", "autocast ends", "another dtype"])
def test_the_copies_are_freed(make_driver, end):
    model = build()
    driver = make_driver(model, num_blocks=32)
    with torch.autocast("cpu", dtype=BFLOAT16):
        drive(driver, PROMPTS)
    copies = StorageWeakRef(driver._shadow._copies[0].untyped_storage())
    gc.disable()
    try:
        assert not copies.expired()
        if end == "close":
            driver.close()
        else:
            with torch.autocast("cpu", dtype=torch.float16, enabled=end == "another dtype"):
                drive(driver, PROMPTS)
        assert copies.expired()
    finally:
        gc.enable()


@pytest.mark.parametrize("asleep_for_good", ["cache", "copies"])
def test_a_driver_wakes_whole_or_not_at_all(make_driver, monkeypatch, asleep_for_good):
    """Whichever memory is not there; with room again the driver goes on."""
    driver = make_driver(prepare(build()))
    expected = drive(driver, PROMPTS)
    driver.sleep()
    memories = {"cache": driver._engine.batcher._cache.memory, "copies": driver._shadow._memory}

    def fail():
        raise CacheMemoryError("cuda:0 has no room.")

    with monkeypatch.context() as patch:
        patch.setattr(memories[asleep_for_good], "take_back", fail)
        with pytest.raises(CacheMemoryError, match=r"no room\. The driver still sleeps"):
            driver.wake()
        assert not any(memory.is_held for memory in memories.values())
    driver.wake()
    assert all(memory.is_held for memory in memories.values())
    assert drive(driver, PROMPTS) == expected


def test_no_memory_for_the_copies(make_driver, monkeypatch):
    """One line; the model is the caller's again, and the driver goes on once there is memory."""
    model = prepare(build().train())
    before, driver = values(model), make_driver(model)
    expected = drive(driver, PROMPTS)
    driver._shadow.release()

    def fail(*_):
        raise CacheMemoryError("cuda:0 has no room for 3 GiB.")

    with monkeypatch.context() as patch:
        patch.setattr("cbexp.engine.shadow.allocate", fail)
        with pytest.raises(
            EngineError, match=r"copy of the float32 weights in bfloat16, and cpu has no 0\.00 GiB"
        ):
            drive(driver, PROMPTS)
    assert values(model) == before
    assert model.training
    assert drive(driver, PROMPTS) == expected


def test_the_copies_sleep_and_are_of_new_weights_afterwards(make_driver):
    model = prepare(build())
    driver = make_driver(model, num_blocks=32)
    before = drive(driver, PROMPTS)
    num_bytes = driver.resolved["shadow_bytes"]
    for _ in range(2):
        driver.sleep()
        assert driver._shadow._copies[0].untyped_storage().nbytes() == 0
        assert driver.resolved["shadow_bytes"] == num_bytes > 0
        with torch.no_grad():
            model.lm_head.weight.neg_()
        driver.wake()
        assert driver._shadow._copies[0].untyped_storage().nbytes() == num_bytes
        driver.sleep()
        after = drive(driver, PROMPTS)
        assert after == drive(make_driver(in_half_precision(model)), PROMPTS)
    assert after == before


@pytest.mark.gpu
@pytest.mark.parametrize("fusion", ["none", "layers"])
def test_graphs_find_the_copies_again(make_driver, fusion):
    model = build().cuda()
    settings = {"num_blocks": 32, "fusion": fusion, "compile_mode": "cuda_graph"}
    with torch.autocast("cuda", dtype=BFLOAT16):
        driver = make_driver(model, **settings)
        expected = drive(driver, PROMPTS)
        addresses = [copy.data_ptr() for copy in driver._shadow._copies]
        num_graphs, seconds = driver.compile_stats["graphs"], driver.compile_stats["capture_s"]
        for _ in range(5):
            driver.sleep()
            assert drive(driver, PROMPTS) == expected
        assert [copy.data_ptr() for copy in driver._shadow._copies] == addresses
        assert (driver.compile_stats["graphs"], driver.compile_stats["capture_s"]) == (num_graphs, seconds)
