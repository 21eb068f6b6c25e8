"""The thread pool for long texts and grammars. `cachesvc.service` makes and closes it."""

from api.access.fair_pool import FairPool

NUM_THREADS = 2
MAX_PENDING = 256  # long texts to tokenise and grammars to compile, under way or waiting


def encoder_pool() -> FairPool:
    return FairPool(
        NUM_THREADS,
        max_pending=MAX_PENDING,
        name="cachesvc-encode",
        what="long prompts and grammars wait to be prepared",
    )
