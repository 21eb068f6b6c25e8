"""What the documents say of the code and of its clients is so, and each class has a name of its
own."""

import ast
import json
import re
from collections import defaultdict
from fnmatch import fnmatch
from pathlib import Path

import pytest

from cachesvc.observability.table import METRICS
from tests.clients.matrix import PROGRAMS, RESULTS, rows
from tests.reference import pages

ROOT = Path(__file__).parents[2]
PACKAGES = ("cachesvc", "api", "engine", "billing", "tiers")
FOLDERS = ("cachesvc", "api", "engine", "billing", "tiers", "ops", "tests", "docs")
BELOW = (path for folder in FOLDERS for path in (ROOT / folder).rglob("*.md"))
DOCUMENTS = (*ROOT.glob("*.md"), *BELOW)


@pytest.mark.parametrize(
    "name", ["settings.md", "commands.md", "metrics.md", "errors.md", "fields.md"]
)
def test_a_reference_page_is_what_the_code_says(name):
    written = (ROOT / "docs" / name).read_text(encoding="utf-8")
    assert pages()[name] == written, "run `make docs`"


def test_every_metric_of_ours_is_on_a_board():
    boards = "".join(path.read_text() for path in (ROOT / "ops").rglob("*.json"))
    assert [] == [name for name in METRICS if name not in boards and not name.startswith("vllm:")]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_between_documents_lead_somewhere(document):
    links = re.findall(r"\]\(([^)#\s]+)[^)]*\)", document.read_text(encoding="utf-8"))
    local = [link for link in links if not re.match(r"[a-z]+:", link)]
    assert [] == [link for link in local if not (document.parent / link).exists()]


def test_the_readme_names_every_folder_of_the_house_and_every_page():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    pages_there = {f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")}
    assert set() == {page for page in pages_there if page not in readme}
    assert [] == [folder for folder in FOLDERS if f"{folder}/" not in readme]


@pytest.mark.parametrize("package", ["api", "engine", "billing", "tiers"])
def test_a_packages_readme_names_its_modules(package):
    """By name or by pattern (`disk*`), in its table; and none that is gone."""
    text = (ROOT / package / "README.md").read_text(encoding="utf-8")
    rows = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    named = [name for row in rows for name in re.findall(r"`([\w*]+)`", row)]
    modules = {path.stem for path in (ROOT / package).glob("*.py")} - {"__init__"}
    folders = {path.parent.name for path in (ROOT / package).glob("*/__init__.py")}
    there = modules | folders
    assert [] == [each for each in sorted(there) if not any(fnmatch(each, n) for n in named)]
    assert [] == [name for name in named if not any(fnmatch(each, name) for each in there)]


@pytest.mark.parametrize("package", PACKAGES)
def test_a_folder_of_the_house_is_small_and_says_what_lives_there(package):
    for folder in {path.parent for path in (ROOT / package).rglob("*.py")}:
        assert 23 >= len(list(folder.glob("[!_]*.py"))), f"{folder} is crowded"
        assert (folder / "__init__.py").read_text(encoding="utf-8").strip(), folder


def test_every_command_that_a_document_names_is_there():
    """Save in the changelog, which names those of its time."""
    there = set(re.findall(r"^## cachesvc ([a-z ]+)$", pages()["commands.md"], re.M))
    groups = {command.split()[0] for command in there} - there
    for path in DOCUMENTS:
        text = "" if path.name == "CHANGELOG.md" else path.read_text(encoding="utf-8")
        for first, second in re.findall(r"(?:`|[$] |bin/)cachesvc ([a-z]+)(?: ([a-z]+))?", text):
            command = f"{first} {second}" if second and first in groups else first
            assert command in there | groups, f"{path}: cachesvc {command}"


def test_options_of_commands_are_named_as_they_are():
    """In every document, and in what the server and the commands tell people to run."""
    options = {
        path: set(re.findall(r"`(--[a-z-]+)`", text))
        for path, text in re.findall(
            r"^## cachesvc ([a-z ]+)$(.*?)(?=^## |\Z)", pages()["commands.md"], re.M | re.S
        )
    }
    sources = (path for folder in ("api", "cachesvc") for path in (ROOT / folder).rglob("*.py"))
    for path in (*DOCUMENTS, *sources):
        for words in re.findall(r"cachesvc ([a-z][^\n`#]*)", path.read_text(encoding="utf-8")):
            names = [name for name in options if f"{words} ".startswith(f"{name} ")]
            for flag in re.findall(r"(?<!\S)--[a-z-]+", words) if names else ():
                assert flag in {*options[max(names, key=len)], "--help"}, f"{path}: {words}"


def test_the_readme_shows_what_the_clients_did_and_each_cell_was_tried_and_passed():
    results = json.loads(RESULTS.read_text(encoding="utf-8"))
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert "\n".join(rows(results)) in readme, (
        "run `python -m tests.clients.matrix` and paste its table"
    )
    assert {name: set(program.cells()) for name, program in PROGRAMS.items()} == {
        name: {cell for cell, line in told["cells"].items() if "seen" in line}
        for name, told in results["clients"].items()
    }


# Names that mean two things on purpose, or the same thing twice.
SHARED = {
    "Block": "of KV here; of a message's content where that is the protocol's word",
    "Tokenizer": "ours, and the part of it that api asks for",
    "History": "of the server's counters, and the part of it that the admin pages ask for",
    "Parser": "of a model's text; and vLLM's of arguments, within a function",
}


def test_a_class_shares_its_name_with_none():
    """In all five packages."""
    found = defaultdict(list)
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ClassDef):
                    found[node.name].append(str(path.relative_to(ROOT)))
    twice = {name: places for name, places in found.items() if len(places) > 1}
    new = {name: at for name, at in twice.items() if name not in SHARED and name[0] != "_"}
    assert {} == new, "give one of them another name"
