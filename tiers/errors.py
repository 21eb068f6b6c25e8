"""What can go wrong in the tiers, and the closed set of reasons a block was not served.

TierError
├── ConfigurationError    a size or path that cannot work; raised at start-up
├── DirectoryLocked       another process holds the data directory; names the holder
├── OutOfBlocks           every device block is referenced; the scheduler preempts or waits
├── NotSaved              a change that must survive a restart cannot be written to its file
├── PurgeFailed           blocks were left, or would be; the message says why and what to do
├── CopyFailed            the device refused a copy; nothing has moved
├── TierClosed            an operation on a closed tier
└── NodeError             a node refuses a message, or a client does not understand its answer
    └── NodeGone          the node cannot be reached, or went away; all its leases are over

A block that cannot be served is not an exception: it is a miss with a `MissReason`.
"""

from enum import StrEnum
from typing import Final


class TierError(Exception):
    """Any failure of the tiers that a caller can act on."""


class ConfigurationError(TierError):
    """A setting that cannot work. The message names it, its value and a valid one."""


class DirectoryLocked(TierError):
    """Another process holds the data directory."""


class OutOfBlocks(TierError):
    """Every block of the device pool is referenced."""


class NotSaved(TierError):
    """A change that must survive a restart cannot be written. The message says what stands now."""


class PurgeFailed(TierError):
    """Something was left, or would be, so there is no receipt. The message says what."""


class CopyFailed(TierError):
    """The device refused a copy of a block. Its source is as it was, and nothing is under way."""


class TierClosed(TierError):
    """The tier was closed before this operation."""


class NodeError(TierError):
    """A message between a node and its client that one of them cannot accept."""


class NodeGone(NodeError):
    """The node cannot be reached, or closed the connection."""


class MissReason(StrEnum):
    """Why a token of a prompt was computed rather than served; the labels of every miss counter."""

    ABSENT = "absent"  # no tier holds the block
    COLLISION = "collision"  # same key, another scope, parent or tokens
    CHECKSUM = "checksum"  # the payload is not what was written
    TORN = "torn"  # the record is shorter or longer than its header says
    VERSION = "version"  # written by another record format
    LAYOUT = "layout"  # written for another block layout
    IO_ERROR = "io_error"  # the operating system refused the read
    DECODE = "decode"  # the payload does not decompress
    COPY = "copy"  # the device refused to copy the block
    ARITHMETIC = "arithmetic"  # held, but computed by another processor, device or torch
    SLOWER_THAN_COMPUTE = "slower_than_compute"  # recomputing is faster than loading
    OVERLOADED = "overloaded"  # the queue of loads was full
    NO_ROOM = "no_room"  # no free frame to load into
    TAIL = "tail"  # the last, partly filled block or the one token always computed
    DISABLED = "disabled"  # the request or the server turned the cache off
    UNREPORTED = "unreported"  # an engine elsewhere did not say what it had, so all is a miss


# Reasons that are a tier's fault: it held the block and could not serve it.
FAULTS: Final = (
    MissReason.COLLISION,
    MissReason.CHECKSUM,
    MissReason.TORN,
    MissReason.VERSION,
    MissReason.LAYOUT,
    MissReason.IO_ERROR,
    MissReason.DECODE,
    MissReason.COPY,
)


def mib(num_bytes: int) -> str:
    gib = num_bytes / (1 << 30)
    return f"{gib:.4g} GiB" if gib >= 1 else f"{num_bytes / (1 << 20):.4g} MiB"
