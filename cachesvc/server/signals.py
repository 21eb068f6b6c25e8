"""The signals that end a server in order."""

import signal


def stop_signals() -> tuple[signal.Signals, ...]:
    """Those that end a server after it has saved what it holds: a closed terminal's too, unless it
    was told to outlive it (`nohup`)."""
    ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return (signal.SIGTERM, signal.SIGINT, *(() if ignored else (signal.SIGHUP,)))
