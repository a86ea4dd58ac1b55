"""What training and the caller put around a model's forwards: the one is not run in a drive, the other is."""

from __future__ import annotations

import functools

import accelerate
import pytest
import torch

from cbexp.engine.attention import ATTENTION_NAME
from cbexp.engine.borrow import borrowed_for_inference
from cbexp.engine.forward.llama import why_not_llama
from tests.engine.driving import drive
from tests.engine.forward.models import build, in_half_precision


def fail_to_compile(graph, inputs):
    raise AssertionError("a program of the caller's ran")


def compile_layer(model):
    model.model.layers[0].compile(backend=fail_to_compile)


def compile_child(model):
    model.model.layers[1] = torch.compile(model.model.layers[1], backend=fail_to_compile)


def compile_forward(model):
    model.forward = torch.compile(model.forward, backend=fail_to_compile)


def lose_logits(model):
    """As TRL's trainers do it, whose loss needs none."""
    pytest.importorskip("trl.trainer.utils").add_fused_lm_head(model, temperature=0.7)


def autocast_forward(model):
    lose_logits(model)
    accelerate.Accelerator(mixed_precision="bf16", cpu=True).prepare_model(model, evaluation_mode=True)
    accelerate.state.AcceleratorState._reset_state()


def autocast_compiled_forward(model):
    compile_forward(model)
    autocast_forward(model)


def require_input_gradients(model):
    model.enable_input_require_grads()
    model.model.embed_tokens.register_forward_hook(make_inputs_require_grad)


def make_inputs_require_grad(module, inputs, output):
    """As PEFT's, which is a local function."""
    output.requires_grad_(True)


WRAPPINGS = [compile_layer, compile_child, compile_forward, lose_logits]
AUTOCASTS = [autocast_forward, autocast_compiled_forward]
WRAPPINGS += [*AUTOCASTS, require_input_gradients, lambda model: setattr(model, "forward", model.forward)]


def attributes(model):
    return {
        name: (
            vars(module),
            dict(vars(module)),
            list(module._modules.items()),
            [*module._forward_hooks.items()],
        )
        for name, module in model.named_modules()
    }


@pytest.mark.parametrize("fusion", ["projections", "layers"])
@pytest.mark.parametrize("wrap", WRAPPINGS)
def test_what_training_puts_around_forwards_is_not_run(wrap, fusion, make_driver_anywhere, prompts, greedy):
    model = build()
    expected = [greedy(model, prompt, 12) for prompt in prompts[:2]]
    if wrap in AUTOCASTS:
        expected = drive(make_driver_anywhere(in_half_precision(model), fusion=fusion), prompts[:2])
    wrap(model)
    before = attributes(model)
    driver = make_driver_anywhere(model, fusion=fusion)
    assert drive(driver, prompts[:2]) == expected
    assert driver.resolved["fusion"] == fusion
    assert attributes(model) == before


def test_what_the_caller_puts_around_forwards_is_run(make_driver, prompts):
    """A decorator bears the marks of the compiled function that it wraps."""
    model, calls = build(), []
    compiled = torch.compile(model.forward, backend="eager")
    model.forward = functools.wraps(compiled)(
        lambda **inputs: calls.append(0) or type(model).forward(model, **inputs)
    )
    model.lm_head.register_forward_hook(lambda *_: calls.append(1))
    with borrowed_for_inference(model, ATTENTION_NAME):
        assert why_not_llama(model).startswith("the model has a hook or a replaced forward")
    drive(make_driver(model), prompts[:1])
    assert calls.count(0) == calls.count(1) > 2
