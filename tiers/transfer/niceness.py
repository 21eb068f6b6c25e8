"""The priority of a thread. No torch here."""

import logging
import os
import threading

logger = logging.getLogger(__name__)


def be_nice(niceness: int) -> None:
    """Let this thread give way to the engine's. Only Linux has niceness per thread."""
    try:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), niceness)
    except (AttributeError, OSError):
        logger.debug(f"{threading.current_thread().name} keeps its priority")
