"""Ctrl-C that comes at a bad moment."""

import signal

import pytest

from cbexp.engine.interrupts import deferring_interrupts


@pytest.fixture(params=["SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2"])
def interrupting(request):
    """A signal that raises KeyboardInterrupt."""
    number = signal.Signals[request.param]
    before = signal.signal(number, signal.default_int_handler)
    yield number
    signal.signal(number, before)


def test_interrupt_comes_after_the_body(interrupting):
    done = []
    with pytest.raises(KeyboardInterrupt), deferring_interrupts():
        signal.raise_signal(interrupting)
        signal.raise_signal(interrupting)
        done.append(True)
    assert done == [True]
    assert signal.getsignal(interrupting) is signal.default_int_handler


def test_ignored_signals_stay_ignored_and_deadly_ones_deadly():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with deferring_interrupts():
            handlers = [signal.getsignal(number) for number in (signal.SIGHUP, signal.SIGUSR1)]
            signal.raise_signal(signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)
    assert handlers == [signal.SIG_IGN, signal.SIG_DFL]


def test_error_of_the_body_is_not_hidden():
    with pytest.raises(ValueError, match="own"), deferring_interrupts():
        raise ValueError("own")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_completions_survive_an_interrupt_after_the_last_step(monkeypatch):
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from cbexp.engine import CBSyncConfig, SyncCBDriver
    from cbexp.engine.engine_slot import EngineSlot

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
    )
    model = Qwen3ForCausalLM(config).train()
    settings = CBSyncConfig(max_new_tokens=4, eos_token_id=(), page_size=16, num_blocks=8)
    with SyncCBDriver(model, config=settings) as driver:
        original = EngineSlot.reset

        def reset(self):
            signal.raise_signal(signal.SIGINT)
            original(self)

        monkeypatch.setattr(EngineSlot, "reset", reset)
        driver.add_requests([[1, 2, 3]])
        with pytest.raises(KeyboardInterrupt):
            driver.drive_until_empty()
        assert [len(c) for c in driver.partial_completions.values()] == [4]
        assert all(module.training for module in model.modules())
        monkeypatch.setattr(EngineSlot, "reset", original)
        driver.add_requests([[1, 2, 3]])
        assert [len(c) for c in driver.drive_until_empty().values()] == [4]
        assert driver.partial_completions == {}


@pytest.mark.parametrize("kind", ["interrupt", "error"])
def test_what_close_did_not_get_to_is_done_in_the_end(new_model, make_driver, prompts, monkeypatch, kind):
    from cbexp.engine import fused_weights

    model = new_model("qwen3")
    driver = make_driver(model, fusion="projections")
    driver.add_requests(prompts)
    driver.drive_until_empty()
    assert any(parameter.untyped_storage().nbytes() > parameter.nbytes for parameter in model.parameters())
    original = fused_weights._release
    releases = []

    def release(group):
        releases.append(group)
        if len(releases) == 2:
            if kind == "error":
                raise MemoryError
            signal.raise_signal(signal.SIGINT)
        original(group)

    monkeypatch.setattr(fused_weights, "_release", release)
    with pytest.raises(KeyboardInterrupt if kind == "interrupt" else MemoryError):
        driver.close()
    if kind == "error":
        driver.close()
    assert all(parameter.untyped_storage().nbytes() == parameter.nbytes for parameter in model.parameters())
    driver.close()
