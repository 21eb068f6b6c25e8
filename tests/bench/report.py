"""The frame of a bench: its arguments, and its figures as JSON with the commit and the machine."""

import argparse
import json
import os
import platform
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def arguments(doc: str | None) -> argparse.ArgumentParser:
    """A parser that is described by the docstring's first line, and knows `--json`."""
    parser = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    return parser


def tell(figures: Mapping[str, Any], file: Path | None) -> None:
    """Print the figures with where they come from, and write them to the file."""
    text = json.dumps({"commit": commit(), "machine": machine(), **figures}, indent=1)
    print(text)
    if file is not None:
        file.write_text(text + "\n")


def commit() -> str:
    """The short hash of what is checked out; empty where that is no git."""
    done = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    )
    return done.stdout.strip()


def machine() -> dict[str, object]:
    model = [row for row in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in row]
    return {
        "cpu": model[0].split(":")[1].strip() if model else platform.processor(),
        "cores": os.cpu_count(),
        "kernel": platform.release(),
        "python": platform.python_version(),
    }
