"""What is frozen for speed is still taken apart when the process ends."""

from pathlib import Path

from tests.children import ran

FOLDER = Path(__file__).parents[2] / "engine"
PROGRAM = """
import sys
sys.path.insert(0, sys.argv[1])
import garbage

class Watched:
    def __init__(self):
        self.itself = self
    def __del__(self):
        print("freed")

Watched()
kept = Watched()
garbage.freeze_loaded()
print("frozen")
"""
SELDOM = """
import gc
import sys
sys.path.insert(0, sys.argv[1])
usual = gc.get_threshold()
import garbage
garbage.freeze_loaded()
print(gc.get_threshold() == usual)
with garbage.scanning_seldom():
    print(gc.get_threshold() == (garbage.YOUNG, *usual[1:]))
garbage.thaw()
print(gc.get_threshold() == usual)
"""


def test_a_cycle_is_freed_before_the_freeze_or_at_the_end() -> None:
    assert ["freed", "frozen", "freed"] == ran(PROGRAM, FOLDER).split()


def test_only_a_server_scans_the_young_seldom() -> None:
    assert 3 * ["True"] == ran(SELDOM, FOLDER).split()
