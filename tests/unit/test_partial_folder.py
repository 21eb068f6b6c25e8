"""A conversion that was killed leaves nothing for good, and one that runs is left alone."""

import subprocess
import sys
from pathlib import Path

import pytest

from engine.partial import partial_folder

HOLD = (
    "import sys, time; from pathlib import Path; from engine.partial import partial_folder\n"
    "with partial_folder(Path(sys.argv[1]), 'gguf-') as partial:\n"
    "    (partial / 'weights').write_bytes(b'w'); print(partial, flush=True); time.sleep(600)"
)


def test_what_a_killed_process_left_is_removed_and_what_runs_is_not(tmp_path):
    folder = tmp_path / "gguf-v2-ab"
    peer = subprocess.Popen([sys.executable, "-c", HOLD, folder], stdout=subprocess.PIPE, text=True)
    theirs = Path(peer.stdout.readline().strip())
    try:
        with partial_folder(folder, "gguf-") as ours:
            assert (theirs / "weights").exists(), "two may convert at once"
            assert ours.exists() and ours != theirs
    finally:
        peer.kill()
        peer.wait()
        peer.stdout.close()
    assert theirs.exists(), "it could not tidy up"
    with partial_folder(folder, "gguf-") as ours:
        assert [ours] == list(tmp_path.iterdir())
        ours.rename(folder)
    assert [folder] == list(tmp_path.iterdir())


def test_a_failure_leaves_nothing(tmp_path):
    with pytest.raises(ZeroDivisionError), partial_folder(tmp_path / "gguf-a", "gguf-"):
        raise ZeroDivisionError
    assert [] == list(tmp_path.iterdir())
