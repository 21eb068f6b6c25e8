"""The command: every part, or those asked for, and one JSON."""

import argparse
import importlib
import json
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import tests.bench.gpu_check as package
from tests.bench.gpu_check.device import free_memory, machine

PARTS = ("parity", "hits", "attention", "copies", "connector", "memory", "speed")
PARTS += ("recording", "conform")


def main(arguments: Sequence[str] | None = None) -> None:
    assert package.__doc__ is not None
    parser = argparse.ArgumentParser(description=package.__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--json", type=Path, default=Path("artifacts/gpu-check.json"))
    parser.add_argument("--small", action="store_true", help="small shapes, to try the code itself")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        sys.exit("there is no CUDA device here; --device cpu --small tries the code without one")
    started = time.perf_counter()
    figures: dict[str, Any] = {"machine": machine(options.device)}
    failed: list[str] = []
    options.json.parent.mkdir(parents=True, exist_ok=True)
    for name in options.only:
        try:
            part = importlib.import_module(f"{package.__name__}.{name}")
            figures[name] = part.check(options.device, options.small)
            failed += failures(name, figures[name])
        except Exception as error:  # noqa: BLE001 - the other parts' figures are wanted too
            traceback.print_exc()
            figures[name] = {"error": repr(error)[:500]}
            failed.append(f"{name}: {error!r}"[:200])
        free_memory(options.device)
        figures["failed"] = failed
        figures["seconds"] = round(time.perf_counter() - started, 1)
        options.json.write_text(json.dumps(figures, indent=1) + "\n")  # what is known so far
    print(json.dumps(figures, indent=1))
    if failed:
        sys.exit("failed: " + "; ".join(failed))


def failures(name: str, figures: Any) -> list[str]:
    """Where a part's figures say `ok: false`, at whatever depth."""
    found = []
    if isinstance(figures, dict):
        if figures.get("ok") is False:
            found.append(f"{name}: {figures.get('what', 'not ok')}")
        for key, value in figures.items():
            found += failures(f"{name}.{key}", value)
    elif isinstance(figures, list):
        for value in figures:
            found += failures(name, value)
    return found


if __name__ == "__main__":
    main()
