"""The commands of `cachesvc cache`, which look into the disk tier beside a live server or alone.

`stats`, `tree`, `ls`, `show` and their like read in short transactions, so that a server goes on
undisturbed. Those that remove and move blocks are in `change` and `purge`.
"""

from cachesvc.cli.lazy import Entry, lazy_group

COMMANDS = {
    "stats": Entry("cachesvc.cli.cache.stats:stats", "How full the tiers are"),
    "tree": Entry("cachesvc.cli.cache.tree:tree", "Blocks as the tree of prefixes that they are"),
    "verify": Entry("cachesvc.cli.cache.verify:verify", "Read and check every block"),
    "ls": Entry("cachesvc.cli.cache.blocks:list_blocks", "List blocks of a tier"),
    "show": Entry("cachesvc.cli.cache.blocks:show", "One block: identity, neighbours, places"),
    "big": Entry("cachesvc.cli.cache.prefixes:big", "The prefixes that take the most room on disk"),
    "hot": Entry("cachesvc.cli.cache.blocks:hot", "The blocks in memory with the most hits"),
    "evict": Entry("cachesvc.cli.cache.change:evict", "Remove blocks by age, scope or amount"),
    "purge": Entry("cachesvc.cli.cache.purge:purge", "Remove every block of a tenant or group"),
    "pin": Entry("cachesvc.cli.cache.pins:pin", "Keep a prefix in the cache for a while"),
    "unpin": Entry("cachesvc.cli.cache.pins:unpin", "End a pin"),
    "pins": Entry("cachesvc.cli.cache.pins:pins", "List the pins in force"),
    "compact": Entry("cachesvc.cli.cache.change:compact", "Give free space in the files back"),
    "export": Entry("cachesvc.cli.cache.change:export", "Write blocks to a file"),
    "import": Entry("cachesvc.cli.cache.change:import_", "Store the blocks of an export"),
}

app = lazy_group(COMMANDS, help="Look into the disk tier and maintain it")
