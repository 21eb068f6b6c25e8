"""Where blocks live: keys, blocks, the device, host and disk tiers, and the cache over them."""
