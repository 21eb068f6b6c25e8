"""LiteLLM's proxy, in an environment of its own, before a server."""

import json
import os
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.patience import free_port, until_ready


@contextmanager
def litellm(program: Path, upstream: str, folder: Path, model: str, *under: str) -> Iterator[str]:
    """The URL of LiteLLM's proxy before one model of another server's. `under` runs it."""
    given = {"model": f"openai/{model}", "api_base": f"{upstream}/v1", "api_key": "any"}
    config = {
        "model_list": [{"model_name": model, "litellm_params": given}],
        "litellm_settings": {"telemetry": False, "num_retries": 0},
        "general_settings": {"dangerously_permit_weak_or_unset_master_key": True},
    }
    file, log, port = folder / "litellm.yaml", folder / "litellm.log", free_port()
    file.write_text(json.dumps(config))
    where = ("--config", file, "--host", "127.0.0.1", "--port", str(port))
    env = {**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_LOG": "ERROR"}
    with log.open("wb") as out:
        process = subprocess.Popen([*under, program, *where], stdout=out, stderr=out, env=env)
    try:
        there = ("127.0.0.1", port)
        until_ready(lambda: socket.create_connection(there, 1).close(), process, log, OSError)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()
