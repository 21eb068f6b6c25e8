"""The wheel holds the five packages and nothing else of ours, with the files that they read."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = {"cachesvc", "api", "engine", "billing", "tiers"}


@pytest.fixture(scope="module")
def names(tmp_path_factory):
    """The wheel's files, built from a copy so that the tree stays as it is."""
    source = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in PACKAGES:
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, source / name, ignore=ignore)
    build = "import setuptools.build_meta as backend, sys; backend.build_wheel(sys.argv[1])"
    target = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [sys.executable, "-W", "ignore", "-c", build, str(target)],
        cwd=source,
        check=True,
        capture_output=True,
        timeout=100,
    )
    (wheel,) = target.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return archive.namelist()


def test_the_top_level_is_exactly_the_five_packages(names):
    top = {name.split("/")[0] for name in names}
    assert PACKAGES == {name for name in top if not name.endswith(".dist-info")}


def test_the_files_that_packages_read_are_in_it(names):
    skipped = {".py", ".pyc", ".md"}
    needed = {
        str(path.relative_to(ROOT))
        for package in PACKAGES
        for path in (ROOT / package).rglob("*")
        if path.is_file() and path.suffix not in skipped and "__pycache__" not in path.parts
    }
    assert set() == needed - set(names)


def test_the_licence_goes_with_it(names):
    assert [name for name in names if name.endswith("licenses/LICENSE")]
