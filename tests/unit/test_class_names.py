"""One class name, one meaning: what the engine and the tiers call a class, nobody else does."""

import ast
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("tiers", "engine", "billing", "api", "cachesvc")

# Names that mean two things on purpose, or the same thing twice.
SHARED = {
    "Block": "of KV here; of a message's content where that is the protocol's word",
    "Tokenizer": "ours, and the part of it that api asks for",
}


def defined() -> dict[str, list[str]]:
    """Every class of the five packages, with the modules that define it."""
    found: dict[str, list[str]] = defaultdict(list)
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ClassDef):
                    found[node.name].append(str(path.relative_to(ROOT)))
    return found


def test_a_class_of_the_engine_or_the_tiers_shares_its_name_with_none() -> None:
    twice = {
        name: places
        for name, places in defined().items()
        if len(places) > 1 and any(place.startswith(("tiers/", "engine/")) for place in places)
    }
    new = {name: places for name, places in twice.items() if name not in SHARED}
    assert {} == new, "give one of them another name"
