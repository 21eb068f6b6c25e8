"""How a command ends: its exit code, and the end of a process that has loaded torch."""

import logging
import os
import sys
from typing import NoReturn


def exit_code(error: Exception) -> int:
    """2 for an unknown option or an invalid value of one, also where the server finds it."""
    from billing.errors import InvalidAmount, InvalidLimit, InvalidName, InvalidSpan
    from cachesvc.config.errors import WrongOption
    from cachesvc.server.server_file import ServerFoundWrong

    values = (InvalidAmount, InvalidLimit, InvalidName, InvalidSpan)
    return 2 if isinstance(error, (WrongOption, ServerFoundWrong, *values)) else 1


def leave(code: int) -> NoReturn:
    """Ends the process without unloading modules. Extension modules would print leaks, and Python
    would destroy torch's modules object by object.

    After Ctrl-C that took a server 5.9 s instead of 0.7 s, on two busy cores (`py-spy dump
    --native` shows `gc_collect_main`).
    """
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
