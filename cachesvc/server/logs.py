"""Configures logging: structlog renders every logger's lines.

Called once by a command, before threads start. Prompts, block contents and keys are never logged.
As a safeguard, a processor masks anything that looks like a key.
"""

import logging
import re
import sys
from typing import TextIO

import structlog
from rich.console import Console
from structlog.typing import EventDict, Processor, WrappedLogger

from cachesvc.config.sections import LogSection

KEY_PATTERN = re.compile(r"\b(sk-[A-Za-z0-9]{2,8})[A-Za-z0-9_-]{8,}")
QUIET = ("uvicorn", "httpx", "httpcore", "transformers", "urllib3", "filelock")


def configure(settings: LogSection, stream: TextIO | None = None) -> None:
    """Send every logger's lines to `stream` (standard error) in the chosen form."""
    out = stream or sys.stderr
    as_json = settings.format == "json" or (settings.format == "auto" and not out.isatty())
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.ExtraAdder(),
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        mask_keys,
    ]
    renderer: list[Processor] = (
        [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
        if as_json
        else [
            structlog.dev.ConsoleRenderer(
                colors=_takes_colours(out),
                # Not the formatter that prints local variables, which hold prompts and keys.
                exception_formatter=structlog.dev.plain_traceback,
            )
        ]
    )
    handler = logging.StreamHandler(out)
    formatter = structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=shared,
        processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *renderer],
    )
    handler.setFormatter(formatter)
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=False,
    )
    logging.basicConfig(handlers=[handler], level=settings.level.upper(), force=True)
    for name in QUIET:
        logging.getLogger(name).setLevel(logging.WARNING)


def _takes_colours(out: TextIO) -> bool:
    """Whether it is a terminal with colours and NO_COLOR is unset (no-color.org)."""
    console = Console(file=out)
    return out.isatty() and console.color_system is not None and not console.no_color


def mask_keys(logger: WrappedLogger, method: str, event: EventDict) -> EventDict:
    for key, value in event.items():
        if isinstance(value, str) and "sk-" in value:
            event[key] = KEY_PATTERN.sub(r"\1***", value)
    return event
