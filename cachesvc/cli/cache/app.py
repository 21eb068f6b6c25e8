"""The commands of `cachesvc cache`.

`stats` and `verify` read the disk tier with or without a running server, in short transactions,
which do not disturb one. `tree` and `purge` ask the server.
"""

from cachesvc.cli.lazy import Command, lazy_group

COMMANDS = {
    "stats": Command("cachesvc.cli.cache.stats:stats", "Show how full the tiers are"),
    "tree": Command("cachesvc.cli.cache.tree:tree", "Show blocks as a tree of prefixes"),
    "verify": Command("cachesvc.cli.cache.verify:verify", "Read and check every block"),
    "purge": Command("cachesvc.cli.cache.purge:purge", "Remove every block of a tenant or group"),
}

app = lazy_group(COMMANDS, help="Inspect and maintain the disk tier")
