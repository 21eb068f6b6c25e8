"""Delays an answer until the shared store has its prompt's blocks.

For disaggregated prefill: one server computes a prompt and answers with one token, and another
server loads the blocks. It computes those that could not be sent in time. Event loop only.
"""

from typing import Final, Protocol

from api.errors import Unsupported
from api.job import Job

PUBLISHED: Final = "X-Cachesvc-Published-Tokens"


class Publisher(Protocol):
    """See `cachesvc.operator.operator`."""

    async def publish(self, job: Job) -> int:
        """How many leading tokens of the first prompt any server can load from now on."""
        ...


def check_publishable(job: Job, publisher: Publisher | None) -> Publisher:
    """Raises Unsupported without a shared store, or if the job may not be sent to it."""
    if publisher is None:
        raise Unsupported(
            "publish needs a tier that servers share, and this server has none; its operator sets "
            "cache.remote_url.",
            param="cachesvc.publish",
        )
    if not job.cache or len(job.prompts) > 1:
        raise Unsupported(
            "publish sends one prompt that is cached; ask for one, and not for cache: false.",
            param="cachesvc.publish",
        )
    return publisher
