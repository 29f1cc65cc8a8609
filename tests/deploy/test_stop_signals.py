"""Ctrl-C and SIGTERM are counted, except where the system shall end the process at once."""

from __future__ import annotations

import signal

from manta.deploy.serve import StopSignals

NUMBERS = (signal.SIGINT, signal.SIGTERM)


def test_signals_are_counted_and_given_back() -> None:
    before = [signal.getsignal(number) for number in NUMBERS]
    signals = StopSignals()
    signals.install()
    try:
        signal.raise_signal(signal.SIGINT)
        assert (signals.asked, signals.forced) == (True, False)
        signal.raise_signal(signal.SIGTERM)
        assert signals.forced
        with signals.left_to_the_system():
            assert [signal.getsignal(number) for number in NUMBERS] == [signal.SIG_DFL, signal.SIG_DFL]
        signal.raise_signal(signal.SIGINT)
        assert signals.count == 3
    finally:
        signals.restore()
    assert [signal.getsignal(number) for number in NUMBERS] == before
