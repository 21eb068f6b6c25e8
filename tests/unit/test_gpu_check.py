"""`make gpu-check` runs where there is a GPU; tried here without one, so that it cannot rot."""

import json
import subprocess
import sys
from pathlib import Path

from tests.bench import gpu_check

ROOT = Path(__file__).parents[2]


def test_the_check_runs_whole_on_a_cpu(tmp_path: Path) -> None:
    path = tmp_path / "made" / "figures.json"
    gpu_check.main(["--device", "cpu", "--small", "--json", str(path)])
    figures = json.loads(path.read_text())
    assert all(row["same_tokens"] for row in figures["parity"])
    assert len(figures["parity"]) == 6
    assert {"promote_share", "demote_share"} <= set(figures["copies"])
    (speed,) = figures["speed"]
    assert speed["ours"]["graphs"]["decode_tokens_per_s"] > 0
    assert "tokens_per_s" in speed["generate_batch"], speed["generate_batch"]


def test_it_asks_for_nothing_that_a_bare_machine_with_torch_may_lack() -> None:
    """The server's own dependencies are not there."""
    code = (
        "import sys\n"
        "for name in ('lmdb', 'gguf', 'peft', 'xgrammar', 'sqlalchemy', 'fastapi', 'structlog'):\n"
        "    sys.modules[name] = None\n"
        "import tests.bench.gpu_check\n"
    )
    child = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert child.returncode == 0, child.stderr
