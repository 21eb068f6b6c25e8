"""What commands and options there were, by how they were typed, and what to use instead."""

from typing import Any

_BOOK_IT = "a tenant has one currency: convert the payment, then book it in that"
_PINS = (
    "the dashboard's explorer pins; a script asks POST /admin/api/cache/pin and unpin, and "
    "GET /admin/api/cache/pins"
)
_ITSELF = "the disk leaves its file system the room that `cache.disk_reserve_bytes` names"
_FOLDER = "while no server runs, its data directory's disk folder may be removed"
_COPY = "copy the data directory's disk folder while its server is stopped"

REMOVED = {
    "budgets": "`cachesvc tenants budget`",
    "doctor": "`cachesvc serve` checks the machine first and names what to fix; where it runs, GET "
    "/health/ready says why it does not serve",
    "invoice": "the billing system that `cachesvc usage export` feeds issues invoices; "
    "`cachesvc usage` has its statements",
    "diff": "send both; `cachesvc explain ID` of the second names the token at which it diverges",
    "monitor": "block events are published at `events.zmq`, in vLLM's format; see docs/events.md",
    "latency": "`cachesvc top` and the dashboard show percentiles, GET /metrics has them",
    "admin list": "`cachesvc keys list`",
    "admin password": "one logs in with a key: `cachesvc keys create --tenant TENANT --name NAME "
    "--scope admin`, or `--scope read` to look only",
    "admin remove": "`cachesvc keys revoke KEY`",
    "balance adjust": "`cachesvc ledger correct TENANT REFERENCE --to AMOUNT`",
    "balance chargeback": "`cachesvc balance withdraw TENANT AMOUNT --chargeback`",
    "balance grant --for": "give a grant that any request spends, with --expires",
    "balance show": "`cachesvc tenants show TENANT`",
    **{
        f"balance topup --{name}": _BOOK_IT
        for name in ("currency", "rate", "rate-date", "rate-source")
    },
    "balance withdraw --currency": _BOOK_IT,
    "bench ttft --block-size": "set CACHESVC_CACHE__BLOCK_SIZE instead",
    "bench ttft --device": "set CACHESVC_MODEL__DEVICE instead",
    "bench ttft --kv-dtype": "set CACHESVC_MODEL__KV_DTYPE instead",
    "bench ttft --model": "set CACHESVC_MODEL__NAME instead",
    "bench ttft --output": "redirect the output of --json",
    "bench ttft --repeats": "each kind of hit is asked for five times; leave it out",
    "cache big": "`cachesvc cache tree` draws the prefixes with their sizes",
    "cache compact": f"{_ITSELF}; {_FOLDER}",
    "cache evict": f"{_ITSELF}, and `cache.idle_ttl` removes the unused; {_FOLDER}",
    **dict.fromkeys(("cache export", "cache import"), _COPY),
    "cache hot": "`cachesvc cache tree`, which has the hits",
    "cache ls": "`cachesvc cache tree` draws the prefixes; --json has their keys",
    **dict.fromkeys(("cache pin", "cache pins", "cache unpin"), _PINS),
    "cache purge --database-url": "the running server purges, and has its ledger; leave it out",
    "cache purge --scope": _FOLDER,
    "cache show": "the dashboard's explorer shows a block; `cachesvc cache tree` draws its prefix",
    "cache tree --children": "the server draws what fits; --depth and --tenant choose",
    "cache tree --live": "it asks the running server, which has every tier; leave it out",
    "conform --adapter": "serve it, and ask it by its name: `cachesvc conform URL --model NAME`",
    **{
        f"conform --{name}": "ask the server itself: `cachesvc conform URL`"
        for name in ("check", "public-key", "data-dir")
    },
    "conform --cold": "the ways of cachesvc, vLLM, SGLang and llama-server are known; leave it out",
    "conform --dtype": "set CACHESVC_MODEL__DTYPE instead",
    "conform --engine": "set CACHESVC_ENGINE__BACKEND instead",
    "conform --offline": "start a server with small tiers, and give its URL: see docs/exactness.md",
    "conform --output": "redirect the output of --json",
    "conform --restart": "restart the server between two runs with one --seed",
    "ledger heads": "`cachesvc ledger verify --print-heads`",
    "ledger holds": "`cachesvc ledger show --holds`",
    "ledger rebuild": "`cachesvc ledger verify --rebuild`",
    "ledger refund": "`cachesvc ledger correct TENANT REQUEST`, for each request",
    "ledger rerate": "`cachesvc prices plan`, without a card",
    "ledger trail": "`cachesvc ledger show --trail`",
    **dict.fromkeys(
        ("ledger correct --approve", "ledger correct --batch", "prices plan --out"),
        "give requests back one by one: `cachesvc ledger correct TENANT REQUEST --amount N`",
    ),
    **dict.fromkeys(("prices diff", "prices show --diff"), "compare the cards' TOML files"),
    "prices lint": "`cachesvc prices show CARD --lint`",
    **dict.fromkeys(
        ("replay --currency", "replay --hit-price", "replay --miss-price"),
        "multiply the tokens of --json by your card's prices",
    ),
    "replay --policy": "every tier evicts in LRU order; leave it out",
    **dict.fromkeys(
        ("replay --servers", "replay --shared"),
        "replay each server's own trace, with a shared store as its last of --tiers",
    ),
    "replay --token-bytes": "multiply `written_blocks` of --json by the bytes of a block",
    **dict.fromkeys(
        ("tenants budget --ask", "tenants budget --most"),
        "Prometheus asks for top-ups: see TopUpWanted in ops/prometheus/rules.yml",
    ),
    "tenants budget --hard": "every budget refuses what would pass it; leave it out",
    "tenants limit": "`cachesvc tenants set TENANT --postpaid AMOUNT`",
    "tenants list": "`cachesvc tenants show`, without a name",
    "tenants project": "`cachesvc tenants set TENANT --add-project NAME`",
    "tenants resume": "`cachesvc tenants set TENANT --resume`",
    "tenants suspend": "`cachesvc tenants set TENANT --suspend`",
    "usage daily": "`cachesvc usage --by day`",
    "usage export --format": "a URL gets CloudEvents, a file FOCUS rows; leave it out",
    "usage export --reconcile": "compare `cachesvc usage --by day` with the service's sums by day",
    "usage monthly": "`cachesvc usage --by month`",
    "usage receipt-keys": "`cachesvc usage receipt --public-keys`",
    "usage session": "`cachesvc usage --by session`",
    "usage statement": "`cachesvc usage --statement MONTH --tenant TENANT`",
    "usage statusline": "`cachesvc usage --since today`",
    "usage verify-receipt": "`cachesvc usage receipt --check FILE`",
}


def instead_of(context: Any, name: str) -> str | None:
    """What to use instead of a command or option of this name, after what `context` has read."""
    return REMOVED.get(f"{context.command_path.partition(' ')[2]} {name}".strip())
