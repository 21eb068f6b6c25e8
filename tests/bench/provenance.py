"""Where a bench's figures come from: the commit and the machine, for its JSON."""

import os
import platform
import subprocess
from pathlib import Path


def commit() -> str:
    """The short hash of what is checked out; empty where that is no git."""
    done = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    )
    return done.stdout.strip()


def machine() -> dict[str, object]:
    model = [
        line for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line
    ]
    return {
        "cpu": model[0].split(":")[1].strip() if model else platform.processor(),
        "cores": os.cpu_count(),
        "kernel": platform.release(),
        "python": platform.python_version(),
    }
