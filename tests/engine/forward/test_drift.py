"""How far fused steps are from the model's own code in bfloat16, on the rows of answers that a trained model gives."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import cbexp
from cbexp.dataset.arithmetic import build_questions
from cbexp.engine.forward import ForwardChoice, PlainForward
from cbexp.engine.sampling import choose, compute_logits


class BothForwards:
    """Each step by the model's own code and then fused, on the same tokens and cache; the fused one's tokens count."""

    def __init__(self, own, fused, drifts):
        self._own, self._fused, self._drifts = own, fused, drifts
        self.begin, self.read, self.end = fused.begin, fused.read, fused.end

    def __call__(self, token_ids, positions):
        own = self._own(token_ids, positions).float().log_softmax(-1)
        fused = compute_logits(self._fused(token_ids, positions)).float().log_softmax(-1)
        chosen, best = choose(fused)
        drift = (best - own.gather(1, chosen[:, None])[:, 0])[positions >= 0]
        self._drifts.append(drift.abs().cpu())
        return fused

    def prefill(self, batch, num_rows):
        return self._fused.prefill(batch, num_rows)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_log_probabilities_of_generated_tokens_are_those_of_the_models_own_code(
    device, make_driver_anywhere, monkeypatch
):
    drifts = []
    build_forward = ForwardChoice._build_forward

    def build_both(self):
        if self.fusion == "none":  # the trial at construction
            return build_forward(self)
        return BothForwards(PlainForward(self._model, self._pages), build_forward(self), drifts)

    monkeypatch.setattr(ForwardChoice, "_build_forward", build_both)
    folder = Path(cbexp.__file__).parent / "assets" / "tiny"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).to(device).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    questions = build_questions(32, 7, split="heldout")
    chats = [[{"role": "user", "content": question.text}] for question in questions]
    prompts = tokenizer.apply_chat_template(chats, add_generation_prompt=True, return_dict=False)
    limits = {"max_new_tokens": 48, "max_batch_tokens": 4096, "eos_token_id": tokenizer.eos_token_id}
    driver = make_driver_anywhere(model, fusion="layers", self_check=False, **limits)
    driver.add_requests(prompts)
    num_tokens = sum(map(len, driver.drive_until_empty().values()))
    assert driver.resolved["fusion"] == "layers"
    drift = torch.cat(drifts)
    assert len(drift) == num_tokens - len(prompts)  # the first token of each is its prefill's
    assert drift.mean() <= 0.01
    assert drift.max() <= 0.3
