"""The sections of the settings: what a user may choose, with meaning, bounds and default."""

import re
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
)

from cachesvc.config.places import default_data_dir
from cachesvc.config.quantities import parse_duration, parse_size

Size = Annotated[int, BeforeValidator(parse_size), Field(ge=0)]
Duration = Annotated[float, BeforeValidator(parse_duration), Field(ge=0)]


class Section(BaseModel):
    """One table of the file. Unknown keys are refused, values never change."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)


class ServerSection(Section):
    """Where the server listens and what it lets in."""

    host: str = Field(
        "127.0.0.1", description="Address to listen on; others than loopback need keys"
    )
    port: int = Field(8000, ge=0, le=65535, description="Port to listen on; 0 takes a free one")
    data_dir: Annotated[Path, BeforeValidator(lambda value: Path(value).expanduser())] = Field(
        default_factory=default_data_dir,
        description="Directory of the disk tier, the ledger and prepared models",
    )
    require_keys: bool = Field(
        False, description="Answer only requests with an API key; implied once a key exists"
    )
    max_body_bytes: Size = Field(
        4 << 20,
        description="Largest request body; reading one of brackets alone takes 60 ns a byte",
    )
    drain: Duration = Field(30, description="When stopping, let running requests go on this long")
    turn_tokens: int = Field(
        1 << 20,
        ge=0,
        description="Tokens of recent chat turns kept, to tell where the next turn diverges; 0: "
        "none",
    )
    replay_turns: bool = Field(
        False,
        description="Chats go on from the tokens of their last turn, whatever the template "
        "would make of its text; with previous_response_id always",
    )
    drop_lines: tuple[Literal["claude-code-billing"], ...] = Field(
        ("claude-code-billing",),
        description="Lines dropped at the head of system prompts, since they change each time",
    )
    groups: dict[str, list[str]] = Field(
        default_factory=dict,
        description="Sharing groups of public prompts, and their tenants; * is every tenant",
    )


class ModelSection(Section):
    """What is served, and in which arithmetic."""

    name: str = Field(
        "smollm2-135m",
        description="Model: an alias, a folder with safetensors or GGUF, or a hub id",
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="Where it runs; auto takes the GPU if there is one"
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="Arithmetic; auto is float32 on a CPU and bfloat16 on a GPU"
    )
    kv_dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="How KV is kept; auto is the arithmetic's own. Part of every key"
    )
    threads: int = Field(0, ge=0, description="Threads of CPU arithmetic; 0 is one per core")
    adapters: dict[str, str] = Field(
        default_factory=dict,
        description="LoRA adapters: the name clients ask for, and its folder or hub id",
    )

    @field_validator("adapters")
    @classmethod
    def _names_differ(cls, adapters: dict[str, str], info: ValidationInfo) -> dict[str, str]:
        for name in adapters:
            if not name.strip() or not name.isprintable() or name == info.data.get("name"):
                raise ValueError(
                    f"an adapter needs a name of its own, unlike the model's; {name!r} does not do"
                )
        return adapters


class CacheSection(Section):
    """The tiers: how large they are and how blocks move between them."""

    block_size: int = Field(64, ge=1, le=4096, description="Tokens in a block")
    device_bytes: Size = Field(
        1 << 30,
        description="Capacity of the device tier; on a CPU running requests take up to 2 GiB more, "
        "for a second copy of their KV",
    )
    host_bytes: Size = Field(2 << 30, description="Capacity of the host tier; 0 turns it off")
    disk_bytes: Size = Field(8 << 30, description="Capacity of the disk tier; 0 turns it off")
    disk_dirs: list[Path] = Field(
        default_factory=list,
        description="Folders on further disks for blocks, each of disk_bytes; beside the data dir",
    )
    policy: str = Field(
        "lru", description="What to evict from memory: lru, sieve, s3fifo, arc, ..."
    )
    write_policy: Literal["on_evict", "write_through", "on_second_hit"] = Field(
        "on_evict", description="When a block is copied to the tier below"
    )
    perceptual_digests: bool = Field(
        False, description="Serve hits across perceptual content digests, labelled approximate"
    )
    weigh_loads: bool = Field(
        True, description="Load from disk only what loads faster than it is recomputed"
    )
    remote_url: str = Field(
        "",
        description="Tier that servers share: redis://, redis+cluster:// or s3://bucket/prefix",
    )
    remote_writes: Literal["reused", "all"] = Field(
        "reused", description="What goes to the remote tier: hit twice or pinned, or everything"
    )
    remote_key_file: Path | None = Field(
        None, description="File with a key of 64 hex digits; encrypts what the remote tier holds"
    )
    idle_ttl: Duration = Field(
        0, description="Forget blocks on disk that nobody used for so long; 0 keeps them"
    )
    quotas: dict[str, Size] = Field(
        default_factory=dict,
        description="Bytes over all tiers that others cannot evict: by tenant, as group:NAME for a "
        "sharing group, and as * for each scope without a quota of its own",
    )
    write_budget_bytes: Size = Field(
        0, description="Most bytes written to disk a day; 0 sets no limit"
    )


class EngineSection(Section):
    """What computes, and how requests share it."""

    backend: Literal["embedded", "vllm"] = Field(
        "embedded", description="What computes: our own engine, or vLLM over a node of ours"
    )
    vllm: dict[str, str | int | float | bool] = Field(
        default_factory=dict,
        description="vLLM's own arguments, such as tensor-parallel-size; or --vllm.NAME VALUE",
    )
    node: Path | None = Field(
        None,
        description="Socket of the node below vLLM; unset, one in the data directory is started",
    )
    max_running: int = Field(64, ge=1, description="Sequences that decode at once")
    max_waiting: int = Field(
        1024,
        ge=1,
        description="Prompts that may be in flight; more are refused, and one tenant alone has "
        "three quarters",
    )
    max_wait: Duration = Field(
        10,
        gt=0,
        description="A request that would wait longer to begin is refused, with a Retry-After",
    )
    chunk_tokens: int = Field(
        512,
        ge=1,
        description="Prompt tokens computed in one step; a quarter while others decode",
    )


class BillingSection(Section):
    """Prices and the ledger."""

    database_url: str = Field(
        "", description="Ledger database; empty is SQLite in the data directory"
    )
    first_card: str = Field(
        "",
        description="Rate card of a new ledger: a TOML file or a shipped card; empty is the launch "
        "card. `cachesvc prices apply` changes it later",
    )
    slice_tokens: int = Field(
        256, ge=1, description="Output tokens that a hold pays for at a time, by answer"
    )
    server_name: str = Field(
        "server", description="Names this server in its holds; each on one database needs its own"
    )
    alerts_to: str = Field(
        "",
        pattern=r"^(https?://.*)?$",
        description="URL that takes signed webhooks of budgets and low balances; empty: none",
    )
    heads_to: str = Field(
        "",
        description="Where signed heads of the ledger are kept, every hour: a file on another "
        "machine's disk, or an http(s) URL that takes a POST; empty keeps none",
    )


class QuotaTable(Section):
    """One tenant's or key's own quotas per minute; 0 sets no limit."""

    requests: int = Field(0, ge=0)
    miss_tokens: int = Field(0, ge=0)
    output_tokens: int = Field(0, ge=0)
    concurrency: int = Field(0, ge=0)


class LimitsSection(Section):
    """Quotas per minute by tenant and by key; 0 sets no limit. Hits never count."""

    url: str = Field("memory://", description="Where they are counted: memory:// or a redis:// URL")
    tenants: dict[str, QuotaTable] = Field(
        default_factory=dict,
        description="Limits a minute by tenant, * for all others: requests, miss_tokens (computed "
        "prompt tokens), output_tokens; and concurrency, requests running at once",
    )
    keys: dict[str, QuotaTable] = Field(
        default_factory=dict, description="The same by id of a key, * for all others"
    )


class EventsSection(Section):
    """Block events for routers, in vLLM's format over ZMQ."""

    zmq: str = Field(
        "", description="Publish block events here, such as tcp://127.0.0.1:5557; empty: nowhere"
    )
    zmq_replay: str = Field(
        "", description="Answer requests for missed batches here, such as tcp://127.0.0.1:5558"
    )
    zmq_topic: str = Field("kv-events", description="Topic that batches are published under")
    zmq_format: Literal["map", "array"] = Field(
        "map", description="How an event is written: map for readers of vLLM 0.24 on, else array"
    )


class TracingSection(Section):
    """OpenTelemetry traces of requests, over OTLP/HTTP; needs the extra `otel`."""

    endpoint: str = Field(
        "",
        description="Collector, such as http://127.0.0.1:4318; empty sends no traces. "
        "OTEL_TRACES_SAMPLER chooses which requests are traced",
    )


class LogFormat(StrEnum):
    AUTO = "auto"
    CONSOLE = "console"
    JSON = "json"


class LogSection(Section):
    """What the log says and how."""

    level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="Least important lines that are written"
    )
    format: LogFormat = Field(
        LogFormat.AUTO, description="console, json, or auto: console on a terminal"
    )


class MetricsSection(Section):
    """What /metrics exposes."""

    vllm_aliases: bool = Field(
        False, description="Expose the names that vLLM's boards and tools know as well"
    )


class JournalSection(Section):
    """What is remembered of the latest requests for the admin pages, also over a restart."""

    requests: int = Field(2000, ge=0, description="Ended requests that are kept; 0 keeps none")
    keep_prompts: bool = Field(
        False, description="Keep the prompts' tokens as well, in memory, for admins to read"
    )


def _price(text: str) -> str:
    if text and not re.fullmatch(r"\d{1,9}(\.\d{1,6})?", text):
        raise ValueError(f"{text!r} is no price; write a decimal such as 0.08")
    return text


Price = Annotated[str, AfterValidator(_price)]


class CostsSection(Section):
    """What memory and disk cost the operator, to weigh it against what they save."""

    gib_month: dict[Literal["device", "host", "disk"], Price] = Field(
        default_factory=dict,
        description="A GiB a month of the tiers device, host and disk, in the card's currency",
    )
