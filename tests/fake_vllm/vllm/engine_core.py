"""The process that vLLM starts beside the one that imports it."""

import time


def run():
    """Print as the real one does, and wait to be ended."""
    print("the engine's process prints on stdout", flush=True)
    time.sleep(600)
