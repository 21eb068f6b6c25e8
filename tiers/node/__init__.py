"""The tiers of one machine as their own process, which engines share and which outlives them.

Blocks of KV cross in shared memory. Keys and leases cross a Unix socket. Serving engines call
`client`. The embedded engine does not use this folder.
"""
