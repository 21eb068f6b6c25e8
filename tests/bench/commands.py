"""What short commands cost where no server runs: CPU time of the whole process.

    python -m tests.bench.commands [--rounds N] [--json FILE]

Estimate: Python 0.03 s, typer with pydantic 0.12, SQLAlchemy 0.25, ours 0.10: 0.5 s of imports. To
look through what they made for garbage, while they are imported and as the process ends, takes a
third more, and is not done.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.bench.provenance import commit, machine

COMMANDS = {
    "python -c pass": None,
    "usage": ["usage"],
    "tenants create": ["tenants", "create"],
    "tenants show": ["tenants", "show"],
    "keys list": ["keys", "list"],
    "prices show": ["prices", "show"],
    "ledger verify": ["ledger", "verify"],
    "cache stats": ["cache", "stats"],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    taken: dict[str, list[float]] = {name: [] for name in COMMANDS}
    with tempfile.TemporaryDirectory() as folder:
        cpu_s(["tenants", "create", "first"], folder)
        for number in range(options.rounds):
            for name, command in COMMANDS.items():
                extra = [f"tenant{number}"] if name == "tenants create" else []
                taken[name].append(cpu_s(command and command + extra, folder))
    result = {
        "machine": machine(),
        "commit": commit(),
        "cpu_s": {name: [min(all_), statistics.median(all_)] for name, all_ in taken.items()},
    }
    for name, all_ in taken.items():
        print(f"{name:16} {min(all_):.2f} {statistics.median(all_):.2f}")
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")


def cpu_s(command: list[str] | None, folder: str) -> float:
    """CPU time of one process, of its own and of the kernel for it."""
    start = "from cachesvc.cli import main; main()"
    arguments = ["-c", "pass"] if command is None else ["-c", start, *command, "--data-dir", folder]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, *arguments], capture_output=True, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


if __name__ == "__main__":
    main()
