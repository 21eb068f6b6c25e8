"""Token ids in, token ids out: scheduler, paged attention and runner. Knows no HTTP and no money."""
