"""Triton's kernels on a machine without a GPU: a file's tests run in a child process, where Triton
interprets its kernels. They are compiled or interpreted for good once Triton is imported."""

import os
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.patience import ended

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
in_child = pytest.mark.skipif(not INTERPRETED, reason="runs in the interpreting child process")
in_parent = pytest.mark.skipif(INTERPRETED, reason="this is the child process")
TIMEOUT_S = 300


def run_in_child(file: str, *options: str, loops: bool = False) -> str:
    """What pytest prints of the tests in this file under the interpreter; all of them pass.

    `loops`: its kernels have loops whose bounds they load.
    """
    triton = pytest.importorskip("triton", reason="triton is not installed")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options, file]
    if triton.__version__ < "3.7":
        # Its interpreter turns one-element arrays into the bounds of a range. NumPy warned of that
        # until 2.3 and refuses it from 2.4 on; the compiler, and later ones, are not concerned.
        if loops and np.lib.NumpyVersion(np.__version__) >= "2.4.0":
            pytest.skip("this Triton's interpreter cannot loop with this NumPy")
        command += ["-W", "ignore:Conversion of an array:DeprecationWarning"]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    child = ended(*command, env=environment, cwd=Path(__file__).parents[2], timeout=None)
    assert child.returncode == 0, child.stdout
    return child.stdout
