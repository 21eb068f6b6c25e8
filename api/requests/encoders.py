"""The thread pool for long texts. `cachesvc.service` makes and closes it."""

from api.access.fair_pool import FairPool

NUM_THREADS = 2
MAX_PENDING = 256  # long texts being tokenised or waiting for it


def encoder_pool() -> FairPool:
    return FairPool(
        NUM_THREADS,
        max_pending=MAX_PENDING,
        name="cachesvc-encode",
        what="long prompts wait to be tokenised",
    )
