"""The sections of the settings: what a user may choose, with meaning, bounds and default."""

import re
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SecretStr,
    ValidationInfo,
    field_validator,
)

from cachesvc.config.places import default_data_dir
from cachesvc.config.quantities import format_size, parse_duration, parse_size

Size = Annotated[int, BeforeValidator(parse_size), Field(ge=0)]
Duration = Annotated[float, BeforeValidator(parse_duration), Field(ge=0)]

LEAST_BYTES = 1 << 20  # less means a forgotten unit: the smallest model's block is 1.4 MiB


def with_its_unit(num_bytes: int) -> int:
    """The size of a tier. Raises ValueError for one that no block fits; 0 is none."""
    if 0 < num_bytes < LEAST_BYTES:
        raise ValueError(
            f"{format_size(num_bytes)} is less than {format_size(LEAST_BYTES)}; "
            f"write it with its unit, like 8GiB"
        )
    return num_bytes


ORIGIN = re.compile(r"\*|(?!http://.*:80$|https://.*:443$)[a-z][a-z0-9+.-]*://[^/?#@*\sA-Z]+")


def as_sent(origin: str) -> str:
    """An origin as browsers send it, or `*`. Raises ValueError for any other text."""
    if not ORIGIN.fullmatch(origin):
        raise ValueError(
            f"{origin!r} is no origin as browsers send it; write it like https://chat.example.com, "
            "in small letters, without a path or a default port"
        )
    return origin


ENGINES = ("embedded", "vllm")
RELAY = "openai+"  # before the URL of an endpoint to which requests pass as they are


def engines(given: str | list[str]) -> str | list[str]:
    """An engine's name, or the URLs of engines. Raises ValueError for anything else."""
    if isinstance(given, str):
        return _an_engine(given)
    if not given or len(set(given)) < len(given) or (len(given) > 1 and set(ENGINES) & set(given)):
        raise ValueError(f"{given!r} are no engines; give each URL once, or one of {ENGINES}")
    if len({each.startswith(RELAY) for each in given}) > 1:
        raise ValueError(f"{given!r}: requests pass to all engines of a model, or to none")
    return [_an_engine(each) for each in given] if len(given) > 1 else _an_engine(given[0])


def _an_engine(name: str) -> str:
    parts = urlsplit(name.removeprefix(RELAY))
    at_url = parts.scheme in ("http", "https") and parts.hostname and not parts.query
    if name not in ENGINES and not (at_url and parts.username is None):
        raise ValueError(
            f"{name!r} is no engine; it is {', '.join(ENGINES)}, http://HOST:PORT or "
            f"{RELAY}http://HOST:PORT"
        )
    return name


def fit_for_a_header(key: SecretStr) -> SecretStr:
    """Raises ValueError for a key that no header can carry."""
    if not re.fullmatch("[!-~]*", key.get_secret_value()):
        raise ValueError("a key has no spaces, and none but ASCII characters")
    return key


TierSize = Annotated[Size, AfterValidator(with_its_unit)]


class Section(BaseModel):
    """One table of the file. Immutable; unknown keys are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)


class ServerSection(Section):
    host: str = Field(
        "127.0.0.1", description="Address to listen on; any address but loopback requires keys"
    )
    port: int = Field(8000, ge=0, le=65535, description="Port to listen on; 0 picks a free one")
    data_dir: Annotated[Path, BeforeValidator(lambda value: Path(value).expanduser())] = Field(
        default_factory=default_data_dir,
        description="Directory of the disk tier, the ledger and prepared models",
    )
    require_keys: bool = Field(
        False, description="Answer only requests with an API key; implied once a key exists"
    )
    max_body_bytes: Size = Field(
        4 << 20, description="Largest request body; parsing takes up to 60 ns a byte"
    )
    cors_origins: list[Annotated[str, AfterValidator(as_sent)]] = Field(
        default_factory=list,
        description="Origins whose pages may use the API from a browser; * is every page, once a "
        "key exists",
    )
    drain: Duration = Field(
        30, description="When stopping, give running requests this long to finish"
    )
    prometheus_url: str = Field(
        "",
        description="Prometheus that has the rules of ops/prometheus; the dashboard shows what it "
        "fires",
    )
    groups: dict[str, list[str]] = Field(
        default_factory=dict, description="Groups of tenants that share prefixes; * is every tenant"
    )


class ModelSection(Section):
    name: str = Field(
        "smollm2-135m",
        description="Model: an alias, a folder with safetensors or GGUF, or a hub id",
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="Device to run on; auto uses the GPU if there is one"
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto",
        description="Data type of the arithmetic; auto is float32 on a CPU and bfloat16 on a GPU",
    )
    kv_dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="Data type of the KV; auto is that of the arithmetic. Part of every key"
    )
    exact: Literal["auto", "always"] = Field(
        "auto",
        description=(
            "Whether a hit may change the last bits of an answer: auto says at the start what is "
            "promised; always refuses to start unless equal bits are. With vLLM, always is its "
            "batch-invariant mode"
        ),
    )
    served_as: str = Field(
        "", description="Name that clients use, and that has a price; empty is the model's own"
    )
    adapters: dict[str, str] = Field(
        default_factory=dict,
        description="LoRA adapters: the name clients use, and a folder or hub id",
    )

    @property
    def client_name(self) -> str:
        return self.served_as or self.name

    @field_validator("adapters")
    @classmethod
    def _names_differ(cls, adapters: dict[str, str], info: ValidationInfo) -> dict[str, str]:
        for name in adapters:
            taken = info.data.get("served_as") or info.data.get("name")
            if not name.strip() or not name.isprintable() or name == taken:
                raise ValueError(
                    f"an adapter needs a name other than the model's; {name!r} cannot be used"
                )
        return adapters


class CacheSection(Section):
    block_size: int = Field(
        0,
        ge=0,
        le=4096,
        description="Tokens in a block; 0 takes 64, or 128 or 256 for a model whose KV is small",
    )
    device_bytes: TierSize = Field(
        0,
        description=(
            "Capacity of the device tier; 0 takes nine tenths of the GPU memory that the model "
            "leaves free, or 1 GiB on a CPU. On a CPU, running requests use up to 2 GiB more "
            "for copies of their KV"
        ),
    )
    host_bytes: TierSize = Field(
        2 << 30,
        description="Capacity of the host tier; with a disk tier at least 16 blocks, even for 0",
    )
    disk_bytes: TierSize = Field(8 << 30, description="Capacity of the disk tier; 0 turns it off")
    disk_reserve_bytes: Size | None = Field(
        None,
        description=(
            "Bytes of its file system that the disk tier leaves to others; unset, 5 %, but 1 to "
            "16 GiB, and a quarter of a small one"
        ),
    )
    write_policy: Literal["on_evict", "write_through", "on_second_hit"] = Field(
        "on_evict", description="When a block is copied to the tier below"
    )
    weigh_loads: bool = Field(
        True,
        description="Load a block only if that is faster than computing it; false always loads",
    )
    remote_url: str = Field(
        "",
        description="Tier shared between servers: redis://, redis+cluster:// or s3://bucket/prefix",
    )
    remote_writes: Literal["reused", "all"] = Field(
        "reused",
        description="Blocks to send to the remote tier: reused (hit twice or pinned) or all",
    )
    remote_key_file: Path | None = Field(
        None, description="File with a key of 64 hex digits, to encrypt the remote tier"
    )
    idle_ttl: Duration = Field(
        0, description="Remove blocks from disk after this long without use; 0 keeps them"
    )
    quotas: dict[str, Size] = Field(
        default_factory=dict,
        description="Bytes over all tiers that others cannot evict: by tenant, as group:NAME for a "
        "sharing group, and as * for each scope without a quota of its own",
    )


Backend = Annotated[str | list[str], AfterValidator(engines)]
EngineKey = Annotated[SecretStr, AfterValidator(fit_for_a_header)]
VllmArguments = dict[str, str | int | float | bool]


class ModelTable(ModelSection):
    """One of several models on one port, with its engine."""

    engine: Backend = "embedded"
    key: EngineKey = SecretStr("")
    vllm: VllmArguments = Field(default_factory=dict)


class EngineSection(Section):
    backend: Backend = Field(
        "embedded",
        description="Engine: embedded, vllm with a cachesvc node below it, or the URL of a vLLM or "
        "SGLang that runs, such as http://10.0.0.5:8000; openai+http://10.0.0.5:8000 passes "
        "requests on as they are, to any endpoint that speaks their protocol; or several URLs of "
        "one model",
    )
    key: EngineKey = Field(
        SecretStr(""),
        description="Key that engines at URLs ask for. Better in the environment than in the file",
    )
    vllm: VllmArguments = Field(
        default_factory=dict,
        description="Arguments for vLLM, such as tensor-parallel-size; or use --vllm.NAME VALUE",
    )
    node: Path | None = Field(
        None, description="Socket of the node below vLLM; unset, the server starts one"
    )
    max_running: int = Field(64, ge=1, description="Sequences that decode at once")
    max_waiting: int = Field(
        1024,
        ge=1,
        description=(
            "Maximum requests in flight; further ones are refused. One tenant gets at most "
            "three quarters"
        ),
    )
    max_wait: Duration = Field(
        10,
        gt=0,
        description="Refuse a request that would wait longer than this, with a Retry-After",
    )
    max_time: Duration = Field(
        7200, gt=0, description="Longest that a request may take in an engine at a URL"
    )
    chunk_tokens: int = Field(
        0,
        ge=0,
        description="Prompt tokens computed in one step, a quarter while others decode; 0: 512, or "
        "2,048 on a GPU",
    )

    @property
    def urls(self) -> list[str]:
        """Of engines that run already; empty for the others."""
        return [each.removeprefix(RELAY) for each in self._named if each not in ENGINES]

    @property
    def is_relay(self) -> bool:
        return self._named[0].startswith(RELAY)

    @property
    def _named(self) -> list[str]:
        return [self.backend] if isinstance(self.backend, str) else self.backend


class BillingSection(Section):
    database_url: str = Field(
        "", description="Ledger database; empty is SQLite in the data directory"
    )
    server_name: str = Field(
        "server", description="Name of this server; each server on one database needs its own"
    )
    heads_to: str = Field(
        "",
        description=(
            "Where to send signed heads of the ledger every hour: a file on another machine's "
            "disk or an http(s) URL; empty sends none"
        ),
    )

    @field_validator("heads_to")
    @classmethod
    def _no_bucket(cls, to: str) -> str:
        if to.startswith("s3://"):
            raise ValueError(
                "heads in a bucket were removed: name a file that is copied there, or the URL of a "
                "receiver that writes them"
            )
        return to


class QuotaTable(Section):
    """One tenant's or key's own quotas per minute; 0 sets no limit."""

    requests: int = Field(0, ge=0)
    miss_tokens: int = Field(0, ge=0)
    output_tokens: int = Field(0, ge=0)
    concurrency: int = Field(0, ge=0)


class LimitsSection(Section):
    """Quotas per minute by tenant and by key; 0 sets no limit. Hits never count."""

    url: str = Field(
        "memory://", description="Where limits are counted: memory:// or a redis:// URL"
    )
    tenants: dict[str, QuotaTable] = Field(
        default_factory=dict,
        description=(
            "Limits by tenant, * for all others: requests, miss_tokens (computed prompt "
            "tokens) and output_tokens a minute; and concurrency, the requests running at "
            "once. A limit that an admin set for a tenant (`tenants set --limit`, or its page) "
            "overrides them"
        ),
    )
    keys: dict[str, QuotaTable] = Field(
        default_factory=dict, description="The same limits by key id, * for all others"
    )


class ZmqTable(Section):
    """How block events are published, with the names of vLLM's `--kv-events-config`."""

    endpoint: str
    replay_endpoint: str = ""  # empty: no replay of missed batches
    topic: str = "kv-events"


class EventsSection(Section):
    """Block events for routers, in vLLM's format over ZMQ."""

    zmq: str | ZmqTable = Field(
        "",
        description="Address that publishes block events, such as tcp://127.0.0.1:5557; or a table "
        "with endpoint, replay_endpoint and topic; empty publishes none",
    )

    @property
    def publisher(self) -> ZmqTable | None:
        """The ZMQ settings; None if events are not published."""
        if isinstance(self.zmq, ZmqTable):
            return self.zmq
        return ZmqTable(endpoint=self.zmq) if self.zmq else None


class LogSection(Section):
    level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="Lowest level of log lines to write"
    )
    format: Literal["auto", "console", "json"] = Field(
        "auto", description="console, json, or auto: console on a terminal"
    )


class JournalSection(Section):
    """The journal of recent requests for the admin pages, which survives a restart."""

    requests: int = Field(2000, ge=0, description="Number of ended requests to remember")
    keep_prompts: bool = Field(
        False, description="Also keep prompt tokens in memory, for admins to read"
    )
