"""Sends a prompt's blocks to the shared store and waits until they are there.

Event loop only. The engine thread passes the work to the disk's writer and the remote tier's
sender.
"""

import asyncio
import time

from api.cache.explorer import Caller
from api.job import Job

LOOK_S = 0.01  # between two checks whether the disk has the blocks
PUBLISH_S = 10.0  # after that the rest is left to be computed


class BlockPublisher:
    """A `Publisher` on one engine."""

    def __init__(self, call: Caller, block_size: int) -> None:
        self._call = call
        self._block_size = block_size

    async def publish(self, job: Job) -> int:
        chain = job.chain(0, self._block_size)
        give_up = time.monotonic() + PUBLISH_S

        while time.monotonic() < give_up:
            sending = await asyncio.wrap_future(self._call(lambda cache: cache.publish(chain)))
            if sending is not None:
                left_s = max(0.0, give_up - time.monotonic())
                try:
                    num_blocks = await asyncio.wait_for(asyncio.wrap_future(sending), left_s)
                except TimeoutError:
                    return 0
                return num_blocks * self._block_size
            await asyncio.sleep(LOOK_S)
        return 0
