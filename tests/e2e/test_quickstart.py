"""The program of docs/quickstart.md, run as printed."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.patience import PATIENCE_S

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1800)]

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/quickstart.md").read_text()


def test_the_second_question_finds_the_document(default_server):
    [program] = re.findall(r"```python\n(.*?)```", PAGE, re.S)
    run = subprocess.run(
        [sys.executable, "-c", program.replace("http://127.0.0.1:8000", default_server)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert 0 == run.returncode, run.stderr
    cached, tokens = re.findall(r"(\d+) of (\d+) tokens were cached", run.stdout)[-1]
    assert int(cached) > 2000
    assert int(cached) > 0.9 * int(tokens)
