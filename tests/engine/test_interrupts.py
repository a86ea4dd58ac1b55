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
        with deferring_interrupts():
            inside = signal.getsignal(signal.SIGHUP)
            if handler is signal.SIG_IGN:
                signal.raise_signal(signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)
    assert inside is handler


def test_an_error_of_the_body_is_not_hidden(interrupting):
    with pytest.raises(ValueError, match="own"), deferring_interrupts():
        raise ValueError("own")
    assert signal.getsignal(interrupting) is signal.default_int_handler
