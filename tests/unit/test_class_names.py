"""One class name, one meaning, in all five packages."""

import ast
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("tiers", "engine", "billing", "api", "cachesvc")

# Names that mean two things on purpose, or the same thing twice.
SHARED = {
    "Block": "of KV here; of a message's content where that is the protocol's word",
    "Tokenizer": "ours, and the part of it that api asks for",
    "History": "of the server's counters, and the part of it that the admin pages ask for",
    "Parser": "of a model's text; and vLLM's of arguments, within a function",
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


def test_a_class_shares_its_name_with_none():
    twice = {name: places for name, places in defined().items() if len(places) > 1}
    new = {name: at for name, at in twice.items() if name not in SHARED and name[0] != "_"}
    assert {} == new, "give one of them another name"
