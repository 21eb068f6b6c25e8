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

_ITSELF = "the disk leaves its file system the room that `cache.disk_reserve_bytes` names"
_REMOVE_FOLDER = "while no server runs, its data directory's disk folder may be removed"
REMOVED = {
    **dict.fromkeys(
        ("pin", "pins", "unpin"),
        "the dashboard's explorer pins; a script asks POST /admin/api/cache/pin and unpin, and "
        "GET /admin/api/cache/pins",
    ),
    "big": "`cachesvc cache tree` draws the prefixes with their sizes",
    "export": "copy the data directory's disk folder while its server is stopped",
    "import": "copy the data directory's disk folder while its server is stopped",
    "compact": f"{_ITSELF}; {_REMOVE_FOLDER}",
    "evict": f"{_ITSELF}, and `cache.idle_ttl` removes the unused; {_REMOVE_FOLDER}",
    "hot": "`cachesvc cache tree`, which has the hits",
    "ls": "`cachesvc cache tree` draws the prefixes; --json has their keys",
    "show": "the dashboard's explorer shows a block; `cachesvc cache tree` draws its prefix",
}

app = lazy_group(COMMANDS, removed=REMOVED, help="Inspect and maintain the disk tier")
