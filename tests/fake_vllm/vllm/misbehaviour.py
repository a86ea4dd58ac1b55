"""What the fake is to do wrong, and where it tells what it did: files in the folder that FAKE_VLLM names."""

import json
import os
import time
from pathlib import Path

FOLDER = Path(os.environ["FAKE_VLLM"])


def asked(word):
    """Whether `word` is in the file of orders now."""
    orders = FOLDER / "orders.txt"
    return orders.exists() and word in orders.read_text().split()


def note(kind, value):
    """Append what happened to the file of notes."""
    with (FOLDER / "notes.jsonl").open("a") as file:
        file.write(json.dumps([kind, value]) + "\n")


def run_engine_core():
    """Stands for the process that vLLM starts beside its caller's: prints as that does, and waits to be ended."""
    print("the engine's process prints on stdout", flush=True)
    time.sleep(600)
