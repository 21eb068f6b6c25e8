"""A request's usage in disjoint classes. Pure values, made in `api` and stored by the ledger."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol, Self

from billing.errors import InvalidUsage


class Counts(Protocol):
    """The interface of the engine's counts, besides a number for each of `HIT_CLASSES`.

    `engine.request.TokenCounts` implements it, so billing does not import the engine.
    """

    @property
    def prompt(self) -> int: ...
    @property
    def output(self) -> int: ...


class TokenClass(NamedTuple):
    """One class of tokens. `rate` is the name of its price, if it is not its own."""

    name: str  # in records, JSON, columns and metrics
    tier: str = ""  # that served it
    rate: str = ""


TOKEN_CLASSES = (  # a class is one line here, a field of `Usage` and of `Rates`, and its price
    TokenClass("hit_device", tier="device"),
    TokenClass("hit_host", tier="host"),
    TokenClass("hit_disk", tier="disk"),
    TokenClass("hit_remote", tier="remote"),
    TokenClass("miss"),
    TokenClass("output"),
    TokenClass("cache_write"),
    TokenClass("cache_write_1h"),
    TokenClass("storage_token_hours", rate="storage"),
    TokenClass("storage_token_minutes", rate="storage_minute"),
    TokenClass("explicit_hit"),
    TokenClass("explicit_write"),
    TokenClass("unreported"),
)
CLASSES = tuple(each.name for each in TOKEN_CLASSES)
HIT_CLASSES = tuple(each.name for each in TOKEN_CLASSES if each.tier)  # the hottest tier first
RATE_OF = {each.name: each.rate or each.name for each in TOKEN_CLASSES}  # names of prices
WRITES = ("cache_write", "explicit_write", "cache_write_1h")
RELATIVE = {"explicit_hit": "hit_device", "unreported": "miss"}  # priced as differences from these
_ALWAYS_TOLD = ("device", "host", "disk")


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Tokens by class. `hit_* + miss` is the prompt, each token in exactly one of them.

    `cache_write` counts computed prompt tokens whose blocks were committed, `explicit_write` those
    that the request marked to keep, and `cache_write_1h` those marked for an hour or longer.
    `explicit_hit` counts the hits within the marked part, and `unreported` the misses of a prompt
    whose engine did not say what it had cached. They change the price and are no part of the prompt
    sum. `storage_token_hours` and `storage_token_minutes` count started hours or minutes
    of each token in a pinned prefix.
    """

    hit_device: int = 0
    hit_host: int = 0
    hit_disk: int = 0
    hit_remote: int = 0
    miss: int = 0
    output: int = 0
    cache_write: int = 0
    cache_write_1h: int = 0
    storage_token_hours: int = 0
    storage_token_minutes: int = 0
    explicit_hit: int = 0
    explicit_write: int = 0
    unreported: int = 0

    def __post_init__(self) -> None:
        for name in CLASSES:
            count = getattr(self, name)
            if type(count) is not int or count < 0:
                raise InvalidUsage(f"{name} is {count!r}; a count is a whole number, zero or more")
        if self.written > self.miss:
            raise InvalidUsage(
                f"cache_write {self.cache_write} + {self.explicit_write} + {self.cache_write_1h} "
                f"exceeds the computed prompt tokens {self.miss}"
            )
        for name, part, whole in (
            ("explicit_hit", self.explicit_hit, self.hit),
            ("unreported", self.unreported, self.miss),
        ):
            if part > whole:
                raise InvalidUsage(f"{name} {part} exceeds the {whole} tokens that it is part of")

    @property
    def hit(self) -> int:
        return sum(getattr(self, name) for name in HIT_CLASSES)

    @property
    def hit_by_tier(self) -> dict[str, int]:
        """Hits by tier, as clients read them; a remote tier only if it served some."""
        hits = {each.tier: getattr(self, each.name) for each in TOKEN_CLASSES if each.tier}
        return {tier: n for tier, n in hits.items() if n or tier in _ALWAYS_TOLD}

    @property
    def written(self) -> int:
        return self.cache_write + self.explicit_write + self.cache_write_1h

    @property
    def prompt(self) -> int:
        return self.hit + self.miss

    @classmethod
    def from_counts(
        cls,
        counts: Counts,
        *,
        written: int = 0,
        written_marked: int = 0,
        written_1h: int = 0,
        marked: int = 0,
        is_reported: bool = True,
    ) -> Self:
        """Usage from the engine's counts. Raises if the hits exceed the prompt.

        `marked` is the number of leading tokens that the request marked to keep; hits are leading
        too.
        """
        hits = {name: getattr(counts, name) for name in HIT_CLASSES}
        hit = sum(hits.values())
        if hit > counts.prompt:
            raise InvalidUsage(f"{hit} hits in a prompt of {counts.prompt} tokens")
        return cls(
            **hits,
            miss=counts.prompt - hit,
            output=counts.output,
            cache_write=written,
            explicit_write=written_marked,
            cache_write_1h=written_1h,
            explicit_hit=min(hit, marked),
            unreported=0 if is_reported else counts.prompt - hit,
        )

    @classmethod
    def from_record(cls, record: Mapping[str, int]) -> Self:
        """Usage from a stored record. Raises for unknown classes rather than dropping them."""
        unknown = sorted(set(record) - set(CLASSES))
        if unknown:
            raise InvalidUsage(f"unknown usage classes {', '.join(unknown)}")
        return cls(**record)

    def record(self) -> dict[str, int]:
        """The nonzero classes, as stored and hashed."""
        return {name: count for name in CLASSES if (count := getattr(self, name))}

    def __add__(self, other: "Usage") -> "Usage":
        return Usage(**{name: getattr(self, name) + getattr(other, name) for name in CLASSES})


EMPTY = Usage()
