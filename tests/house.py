"""The size and shape of the five packages: `python -m tests.house [FOLDER]`.

A row for each package: files, lines, classes, the median and 90th percentile of functions' lines,
and protocols that one class of the product implements. FOLDER is another checkout, such as one made
by `git archive COMMIT | tar -x -C FOLDER`.
"""

import ast
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from statistics import median, quantiles

PACKAGES = ("tiers", "engine", "billing", "api", "cachesvc")
Function = ast.FunctionDef | ast.AsyncFunctionDef
Classes = dict[str, list[ast.ClassDef]]


def nodes_of(folder: Path) -> Iterator[ast.AST]:
    for path in sorted(folder.rglob("*.py")):
        yield from ast.walk(ast.parse(path.read_text()))


def classes_of(root: Path) -> Classes:
    """Every class of the packages, by name."""
    found: Classes = defaultdict(list)
    for package in PACKAGES:
        for node in nodes_of(root / package):
            if isinstance(node, ast.ClassDef):
                found[node.name].append(node)
    return found


def bases(node: ast.ClassDef) -> list[str]:
    return [ast.unparse(base).partition("[")[0].rpartition(".")[2] for base in node.bases]


def members(node: ast.ClassDef, classes: Classes) -> set[str]:
    """Methods, fields and attributes of a class, with those that it inherits."""
    found: set[str] = set()
    for each in ast.walk(node):
        match each:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                found.add(name)
            case ast.Attribute(value=ast.Name("self"), attr=name, ctx=ast.Store()):
                found.add(name)
    for each in node.body:
        match each:
            case ast.AnnAssign(target=ast.Name(name)) | ast.Assign(targets=[ast.Name(name)]):
                found.add(name)
    for name in bases(node):
        for base in classes.get(name, ()) if name not in (node.name, "Protocol") else ():
            found |= members(base, classes)
    return found


def implementations(protocol: ast.ClassDef, classes: Classes) -> int:
    """Classes that have all members of a protocol; callbacks, which functions are, count as 2."""
    wanted = members(protocol, classes)
    if wanted == {"__call__"}:
        return 2
    every = (each for found in classes.values() for each in found)
    concrete = (each for each in every if "Protocol" not in bases(each))
    return sum(wanted <= members(each, classes) for each in concrete)


def row(package: Path, classes: Classes) -> list[str]:
    files = list(package.rglob("*.py"))
    nodes = list(nodes_of(package))
    kinds = [node for node in nodes if isinstance(node, ast.ClassDef)]
    lengths = [
        (node.end_lineno or node.lineno) - node.lineno + 1
        for node in nodes
        if isinstance(node, Function)
    ]
    single = [
        kind.name
        for kind in kinds
        if "Protocol" in bases(kind) and implementations(kind, classes) == 1
    ]
    lines = sum(len(path.read_text().splitlines()) for path in files)
    ninth = quantiles(lengths, n=10)[-1]
    numbers = (len(files), lines, len(kinds), median(lengths), ninth, len(single))
    return [package.name, *(f"{number:,.0f}" for number in numbers)]


def main() -> None:
    root = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parents[1]
    classes = classes_of(root)
    print("package files lines classes median p90 protocols-with-one-class")
    for package in PACKAGES:
        print(*row(root / package, classes))
    twice = sorted(name for name, found in classes.items() if len(found) > 1 and name[0] != "_")
    print("class names with two meanings:", len(twice), *twice)


if __name__ == "__main__":
    main()
