"""Token ids in, token ids out: scheduler, paged attention, runner. Knows no HTTP and no money."""
