"""The commands of `cachesvc cache`, which work on the disk tier with or without a running server.

`stats`, `tree`, `ls`, `show` and similar commands read in short transactions, which do not disturb
a server. Commands that remove blocks are in `change` and `purge`.
"""

from cachesvc.cli.lazy import Command, lazy_group

COMMANDS = {
    "stats": Command("cachesvc.cli.cache.stats:stats", "Show how full the tiers are"),
    "tree": Command("cachesvc.cli.cache.tree:tree", "Show blocks as a tree of prefixes"),
    "verify": Command("cachesvc.cli.cache.verify:verify", "Read and check every block"),
    "ls": Command("cachesvc.cli.cache.blocks:list_blocks", "List blocks of a tier"),
    "show": Command(
        "cachesvc.cli.cache.blocks:show", "Show one block: identity, neighbours, storage"
    ),
    "evict": Command("cachesvc.cli.cache.change:evict", "Remove blocks by age, scope or amount"),
    "purge": Command("cachesvc.cli.cache.purge:purge", "Remove every block of a tenant or group"),
    "pin": Command("cachesvc.cli.cache.pins:pin", "Keep a prefix for a while; list and end pins"),
    "compact": Command("cachesvc.cli.cache.change:compact", "Return free space to the file system"),
}

REMOVED = {
    "big": "`cachesvc cache tree` draws the prefixes with their sizes",
    "export": "copy the data directory's disk folder while its server is stopped",
    "import": "copy the data directory's disk folder while its server is stopped",
    "hot": "`cachesvc cache ls --tier device`, which lists the most used first",
    "pins": "`cachesvc cache pin`, without a name",
    "unpin": "`cachesvc cache pin NAME --end`",
}

app = lazy_group(COMMANDS, removed=REMOVED, help="Inspect and maintain the disk tier")
