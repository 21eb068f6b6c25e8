"""The tiers of one machine as a process of their own, which engines share and which outlives them.

Blocks of KV cross in shared memory; keys and leases cross a Unix socket. Serving engines call
`client`; the embedded engine does not use this folder.
"""
