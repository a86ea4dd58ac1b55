"""How far fused steps are from the model's own code in bfloat16, on the rows of answers that a trained model gives."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import cbexp
from cbexp.dataset.arithmetic import build_questions
from cbexp.engine.decode import decoder as decoder_module
from cbexp.engine.model_forward import ModelForward
from cbexp.engine.sampling import choose_best

FOLDER = Path(cbexp.__file__).parent / "assets" / "tiny"


class BothForwards:
    """Each step by the model's own code and then fused, on the same tokens and cache; the fused one's tokens count."""

    def __init__(self, own, fused):
        self._own, self._fused, self.drifts = own, fused, []

    def __call__(self, token_ids, positions):
        own, fused = (
            f.logits(token_ids, positions).float().log_softmax(-1) for f in (self._own, self._fused)
        )
        chosen, best = choose_best(fused)
        drift = (best - own.gather(1, chosen[:, None])[:, 0])[positions >= 0]
        self.drifts.append(drift.abs().cpu())
        return chosen, best


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_log_probabilities_of_generated_tokens_are_those_of_the_models_own_code(
    device, make_driver_anywhere, monkeypatch
):
    model = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.bfloat16).to(device).eval()
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    chats = [
        [{"role": "user", "content": question.text}] for question in build_questions(32, 7, split="heldout")
    ]
    prompts = tokenizer.apply_chat_template(chats, add_generation_prompt=True, return_dict=False)
    settings = {"fusion": "layers", "max_new_tokens": 48, "max_batch_tokens": 4096, "self_check": False}
    driver = make_driver_anywhere(model, eos_token_id=tokenizer.eos_token_id, **settings)
    forwards, build_runner = [], decoder_module.build_runner

    def build(forward, buffers, *args, **kwargs):
        forwards.append(BothForwards(ModelForward(model, buffers.layers), forward))
        return build_runner(forwards[-1], buffers, *args, **kwargs)

    monkeypatch.setattr(decoder_module, "build_runner", build)
    driver.add_requests(prompts)
    num_tokens = sum(map(len, driver.drive_until_empty().values()))
    assert driver.resolved["fusion"] == "layers"
    (both,) = forwards
    drift = torch.cat(both.drifts)
    assert len(drift) == num_tokens - len(prompts)  # the first token of each is its prefill's
    assert drift.mean() <= 0.01
    assert drift.max() <= 0.3
