"""Ctrl-C that comes at a bad moment, and what a process shows of a driver when it ends."""

import signal
import subprocess
import sys

import pytest

from cbexp.engine.interrupts import deferring_interrupts


@pytest.fixture(params=["SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2"])
def interrupting(request):
    """A signal that raises KeyboardInterrupt."""
    number = signal.Signals[request.param]
    before = signal.signal(number, signal.default_int_handler)
    yield number
    signal.signal(number, before)


def test_an_interrupt_comes_after_the_body(interrupting):
    done = []
    with pytest.raises(KeyboardInterrupt), deferring_interrupts():
        signal.raise_signal(interrupting)
        signal.raise_signal(interrupting)
        done.append(True)
    assert done == [True]
    assert signal.getsignal(interrupting) is signal.default_int_handler


@pytest.mark.parametrize("handler", [signal.SIG_IGN, signal.SIG_DFL])
def test_ignored_signals_stay_ignored_and_deadly_ones_deadly(handler):
    before = signal.signal(signal.SIGHUP, handler)
    try:
        with pytest.raises(ValueError, match="of the body"), deferring_interrupts():
            assert signal.getsignal(signal.SIGHUP) is handler
            if handler is signal.SIG_IGN:
                signal.raise_signal(signal.SIGHUP)
            raise ValueError("of the body")
    finally:
        signal.signal(signal.SIGHUP, before)


SCRIPT = """
from transformers import Qwen3Config, Qwen3ForCausalLM
from cbexp.engine import CBSyncConfig, SyncCBDriver

config = Qwen3Config(vocab_size=97, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
                     num_key_value_heads=1, head_dim=8, eos_token_id=None, bos_token_id=None)

def on_step(index, info):
    if index == 2:
        exec({at_step_2!r})

settings = CBSyncConfig(max_new_tokens=5, num_blocks=8, max_burst=1, on_step=on_step)
driver = SyncCBDriver(Qwen3ForCausalLM(config), None, settings)
driver.add_requests([[1, 2, 3], [4]])
driver.drive_until_empty()
print("finished")
"""


@pytest.mark.parametrize(
    ("at_step_2", "returncode", "stdout", "last_line"),
    [
        pytest.param("pass", 0, "finished\n", None, marks=pytest.mark.slow),
        pytest.param("raise ValueError('mine')", 1, "", "ValueError: mine", marks=pytest.mark.slow),
        ("raise KeyboardInterrupt", -2, "", "KeyboardInterrupt"),
    ],
    ids=["a forgotten close", "an error in a drive", "an interrupt in a drive"],
)
def test_a_driver_left_open_adds_nothing_to_what_the_users_code_raised(
    at_step_2, returncode, stdout, last_line
):
    command = [sys.executable, "-c", SCRIPT.format(at_step_2=at_step_2)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert (result.returncode, result.stdout) == (returncode, stdout)
    assert result.stderr.count("Traceback") == (last_line is not None)
    assert "Exception ignored" not in result.stderr
    assert result.stderr.splitlines()[-1:] == ([last_line] if last_line else [])
