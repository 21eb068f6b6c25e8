"""Each package has a budget of lines. A feature that needs more names what leaves."""

import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BUDGETS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["cachesvc"]["budgets"]


@pytest.mark.parametrize("package", BUDGETS)
def test_a_package_stays_within_its_lines(package):
    """Of Python and C++."""
    files = [f for kind in ("py", "cpp", "h") for f in (ROOT / package).rglob(f"*.{kind}")]
    num_lines = sum(path.read_text(encoding="utf-8").count("\n") for path in files)
    assert num_lines <= BUDGETS[package], f"{package} has {num_lines} lines"
