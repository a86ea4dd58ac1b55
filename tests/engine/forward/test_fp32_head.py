"""A head in float32: logits are not rounded, whatever else the model computes in."""

import pytest
import torch

from cbexp.engine import EngineError
from tests.engine.driving import drive
from tests.engine.models import build_model, random_prompts


@pytest.mark.parametrize("fusion", ["none", "projections"])
def test_logits_are_summed_up_and_kept_in_float32(make_driver, fusion):
    """Of prompts and of steps, by transformers' own code around the head."""
    model, seen = build_model("qwen3").bfloat16(), []
    driver = make_driver(model, fp32_head=True, fusion=fusion, self_check=False, max_new_tokens=5)
    model.lm_head.register_forward_hook(lambda _head, args, output: seen.append((args[0], output)))
    assert drive(driver, random_prompts((5, 9))) != []
    assert len(seen) == 5
    for hidden, logits in seen:
        assert (hidden.dtype, logits.dtype) == (torch.bfloat16, torch.float32)
        torch.testing.assert_close(logits, hidden.float() @ model.lm_head.weight.float().T)
    assert "forward" not in vars(model.lm_head)


def test_the_self_check_rounds_as_the_model_does(make_driver):
    """Its bounds are of the hidden states, which stay in half precision."""
    model = build_model("qwen3", num_hidden_layers=12).bfloat16()
    driver = make_driver(
        model, fp32_head=True, fusion="projections", max_requests_per_batch=32, batch_shape="full"
    )
    assert len(drive(driver, random_prompts((5, 9)), max_new_tokens=4)) == 2
    (check,) = driver.resolved["self_check_results"]
    assert check["mean_logit_spacing"] > 1e-3


def test_a_head_that_is_no_layer_is_refused(make_driver, new_model):
    model = new_model("qwen3")
    model.lm_head = torch.nn.Sequential(model.lm_head)
    driver = make_driver(model, fp32_head=True)
    driver.add_requests([[1, 2]])
    with pytest.raises(
        EngineError, match=r"fp32_head=True needs a head that is a plain torch.nn.Linear.*Sequential"
    ):
        driver.drive_until_empty()
