"""Trains the embedded tiny model: a Qwen3 of about a million parameters that solves `cbexp.dataset.arithmetic`.

On one GPU this takes minutes. One CPU core needs less than 40 minutes for more but smaller steps:

    PYTHONPATH=. python scripts/train_tiny.py --output cbexp/assets/tiny
    PYTHONPATH=. python scripts/train_tiny.py --output cbexp/assets/tiny --steps 7200 --batch-size 32

Stopped early it makes a model that leaves something to learn, for `scripts/grpo.py`:

    PYTHONPATH=. python scripts/train_tiny.py --output cbexp/assets/tiny_early --steps 7200 --batch-size 32 \\
        --evaluate-every 100 --stop-at 0.45 --target 0.4
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import tokenizers
import torch
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from transformers.convert_slow_tokenizer import bytes_to_unicode

from cbexp.dataset.arithmetic import Question, build_questions, verify_answer

# What deterministic algorithms ask of cuBLAS; it is read when CUDA starts.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

START, END, PAD = "<|im_start|>", "<|im_end|>", "<|endoftext|>"
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
)
MAX_LENGTH = 1024
MAX_NEW_TOKENS = 96
QUESTIONS_PER_SEED = 20_000  # beyond this the two-operand questions of one seed become scarce
IGNORED_LABEL = -100


@dataclass(frozen=True)
class TrainingTokens:
    """Right-padded token ids (int16) [questions, longest]; lengths of prompts and sequences [questions]."""

    ids: Tensor
    prompt_lengths: Tensor
    lengths: Tensor


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, required=True, help="folder to write; replaced if it exists")
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--learning-rate", type=float, default=3e-3, help="at its peak")
    parser.add_argument("--num-questions", type=int, default=300_000, help="to train on")
    parser.add_argument("--num-heldout", type=int, default=2000, help="to measure the final accuracy on")
    parser.add_argument(
        "--evaluate-every", type=int, default=500, help="steps between measurements while training"
    )
    parser.add_argument(
        "--target", type=float, default=0.95, help="write nothing below this held-out accuracy"
    )
    parser.add_argument(
        "--stop-at",
        type=float,
        help="end with the first measurement of at least this accuracy; default: all steps",
    )
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    if arguments.device == "auto":
        arguments.device = "cuda" if torch.cuda.is_available() else "cpu"
    return arguments


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Token id = byte value for 0 to 255, then the special tokens."""
    tokenizer = Tokenizer(
        models.BPE(vocab={symbol: byte for byte, symbol in bytes_to_unicode().items()}, merges=[])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in (START, END, PAD)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=PAD,
        extra_special_tokens=[START],
        chat_template=CHAT_TEMPLATE,
        model_max_length=MAX_LENGTH,
        clean_up_tokenization_spaces=False,
    )


def build_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=320,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=MAX_LENGTH,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    return model


def encode_prompts(tokenizer: PreTrainedTokenizerFast, questions: list[Question]) -> list[list[int]]:
    """Return the ids that a user's chat with each question gives, up to where the answer starts."""
    chats = [[{"role": "user", "content": question.text}] for question in questions]
    prompts = tokenizer.apply_chat_template(chats, add_generation_prompt=True, return_dict=False)
    return cast(list[list[int]], prompts)


def build_training_tokens(
    tokenizer: PreTrainedTokenizerFast, num_questions: int, seed: int
) -> TrainingTokens:
    questions: list[Question] = []
    while len(questions) < num_questions:
        num_missing = num_questions - len(questions)
        # Distinct seeds for distinct blocks and runs: a run's blocks count on from a multiple of a million.
        block_seed = seed * 1_000_000 + len(questions)
        questions += build_questions(min(num_missing, QUESTIONS_PER_SEED), block_seed, "train")
    prompts = encode_prompts(tokenizer, questions)
    completions = tokenizer([question.solution + END for question in questions]).input_ids
    sequences = [
        torch.tensor(prompt + rest, dtype=torch.int16)
        for prompt, rest in zip(prompts, completions, strict=True)
    ]
    return TrainingTokens(
        ids=torch.nn.utils.rnn.pad_sequence(
            sequences, batch_first=True, padding_value=tokenizer.pad_token_id
        ),
        prompt_lengths=torch.tensor([len(prompt) for prompt in prompts]),
        lengths=torch.tensor([len(sequence) for sequence in sequences]),
    )


def iterate_batches(lengths: Tensor, batch_size: int, generator: torch.Generator) -> Iterator[Tensor]:
    """Yield row indices [batch_size] for ever, epoch after epoch, with rows of similar length together."""
    rows_sorted_together = 32 * batch_size
    while True:
        shuffled = torch.randperm(len(lengths), generator=generator)
        for rows in shuffled.split(rows_sorted_together):
            batches = rows[lengths[rows].argsort()].split(batch_size)
            for i in torch.randperm(len(batches), generator=generator).tolist():
                if len(batches[i]) == batch_size:
                    yield batches[i]


def select_batch(tokens: TrainingTokens, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return ids and labels [batch, longest of the batch]; prompts and padding have no label."""
    lengths = tokens.lengths[rows]
    ids = tokens.ids[rows, : int(lengths.max())].long()
    positions = torch.arange(ids.shape[1])
    is_completion = (positions >= tokens.prompt_lengths[rows, None]) & (positions < lengths[:, None])
    return ids, ids.masked_fill(~is_completion, IGNORED_LABEL)


def build_schedule(optimizer: torch.optim.Optimizer, num_steps: int) -> torch.optim.lr_scheduler.LambdaLR:
    """Linear warmup over a twentieth of the steps, then a cosine down to zero."""
    num_warmup_steps = max(1, num_steps // 20)

    def scale(step: int) -> float:
        progress = (step - num_warmup_steps) / max(1, num_steps - num_warmup_steps)
        return (step + 1) / num_warmup_steps if progress < 0 else 0.5 * (1 + math.cos(math.pi * progress))

    return torch.optim.lr_scheduler.LambdaLR(optimizer, scale)


def train_model(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    tokens: TrainingTokens,
    monitored: list[Question],
    arguments: argparse.Namespace,
) -> None:
    """Train in place, with loss on completions alone; prints the loss and the accuracy on `monitored`."""
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=arguments.learning_rate, betas=(0.9, 0.98), weight_decay=0.1
    )
    schedule = build_schedule(optimizer, arguments.steps)
    batches = iterate_batches(
        tokens.lengths, arguments.batch_size, torch.Generator().manual_seed(arguments.seed)
    )
    start_s = time.monotonic()
    for step in range(1, arguments.steps + 1):
        ids, labels = (part.to(model.device) for part in select_batch(tokens, next(batches)))
        loss = model(input_ids=ids, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 100 == 0:
            print(f"step {step}: loss {loss.item():.4f}, {time.monotonic() - start_s:.0f} s", flush=True)
        if step % arguments.evaluate_every == 0:
            accuracy = measure_accuracy(model, tokenizer, monitored)
            print(f"step {step}: accuracy {accuracy:.3f}", flush=True)
            if arguments.stop_at is not None and accuracy >= arguments.stop_at:
                return


@torch.no_grad()
def measure_accuracy(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    questions: list[Question],
    batch_size: int = 500,
) -> float:
    """Share of `questions` that greedy decoding answers correctly."""
    model.eval()
    num_correct = 0
    for first in range(0, len(questions), batch_size):
        batch = questions[first : first + batch_size]
        prompts = tokenizer.pad(
            {"input_ids": encode_prompts(tokenizer, batch)}, padding_side="left", return_tensors="pt"
        ).to(model.device)
        sequences = model.generate(**prompts, max_new_tokens=MAX_NEW_TOKENS, do_sample=False)
        completions = tokenizer.batch_decode(
            sequences[:, prompts.input_ids.shape[1] :], skip_special_tokens=True
        )
        num_correct += sum(
            verify_answer(text, question.answer) for text, question in zip(completions, batch, strict=True)
        )
    model.train()
    return num_correct / len(questions)


def write_folder(
    output: Path, model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, record: dict[str, object]
) -> None:
    """Write everything beside `output` and swap it in at the end, so that `output` is never half written."""
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output.parent, prefix=f".{output.name}-") as workspace:
        written, replaced = Path(workspace) / "written", Path(workspace) / "replaced"
        model.save_pretrained(written)
        tokenizer.save_pretrained(written)
        (written / "training.json").write_text(json.dumps(record, indent=2) + "\n")
        for file in written.iterdir():
            file.chmod(0o644)  # safetensors writes files that their owner alone can read
        if output.exists():
            output.rename(replaced)
        written.rename(output)


def main() -> None:
    arguments = parse_arguments()
    start_s = time.monotonic()
    torch.manual_seed(arguments.seed)
    torch.set_float32_matmul_precision("high")  # TF32 where the GPU has it
    # The same seed on the same machine and versions gives the same weights, bit for bit.
    torch.use_deterministic_algorithms(True)
    tokenizer = build_tokenizer()
    model = build_model(tokenizer).to(arguments.device)
    tokens = build_training_tokens(tokenizer, arguments.num_questions, arguments.seed)
    heldout = build_questions(arguments.num_heldout, arguments.seed, "heldout")
    print(
        f"{model.num_parameters():,} parameters, {len(tokens.ids):,} questions, "
        f"{tokens.lengths.float().mean():.0f} tokens each, ready after {time.monotonic() - start_s:.0f} s",
        flush=True,
    )
    train_model(model, tokenizer, tokens, heldout[:500], arguments)
    accuracy = measure_accuracy(model, tokenizer, heldout)
    print(f"held-out accuracy: {accuracy:.4f}")
    if accuracy < arguments.target:
        raise SystemExit(f"Nothing was written: the accuracy is below --target {arguments.target}.")
    record = {
        "held_out_accuracy": accuracy,
        "num_parameters": model.num_parameters(),
        "duration_s": round(time.monotonic() - start_s, 1),
        "settings": {key: value for key, value in vars(arguments).items() if key != "output"},
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "tokenizers": tokenizers.__version__,
        },
    }
    write_folder(arguments.output, model, tokenizer, record)
    print(f"Wrote {arguments.output}.")


if __name__ == "__main__":
    main()
