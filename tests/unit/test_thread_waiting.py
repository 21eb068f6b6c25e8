"""Threads of a team spin for each other only while nothing else needs the processors."""

import gc
import os
import subprocess
import sys
import threading
import time

import pytest

from engine.execution.waiting import WINDOW_S, Waiting, others_used_s
from engine.openmp import SPINS, allowed_processors, configure, quotas
from tests.children import ran

CORES = len(allowed_processors())
TEAM = max(2, CORES)
OF_VERSION_1 = {"cpu/a/cpu.cfs_quota_us": "100000", "cpu/a/cpu.cfs_period_us": "50000"}


class Machine:
    """Steps beside processes that use so many of the processors."""

    def __init__(self, *, told: bool = True) -> None:
        self.now_s, self.used_s = 1000.0, 5.0
        self.running: int | None = None
        self.leaving = 0  # of the running threads, those that are gone after a moment
        self.waiting = Waiting(
            others_s=lambda: self.used_s if told else None,
            running=lambda: self.running,
            clock_s=lambda: self.now_s,
            pause=self.pass_by,
        )

    def pass_by(self, pause_s: float) -> None:
        self.now_s += pause_s
        if self.running is not None and self.leaving:
            self.running, self.leaving = self.running - self.leaving, 0

    def step(self, others: float, *, size: int = TEAM) -> bool:
        """Whether the threads spin after a window with so many processors used by others."""
        self.now_s += WINDOW_S
        self.used_s += (others + CORES - TEAM) * WINDOW_S
        self.waiting.begin(size)
        return self.waiting.spins


def test_threads_spin_only_while_others_leave_them_the_processors():
    machine = Machine()
    steps = [0.0, 0.1, 0.9, 0.2, 0.1, 0.2, 1.7, 0.9, 0.0]
    expected = [True, True, False, False, True, True, False, False, True]
    assert expected == [machine.step(others) for others in steps]


def test_threads_spin_beside_a_neighbour_that_has_gone():
    machine = Machine()
    machine.running = 1 + (os.cpu_count() or 1)
    assert not machine.step(2.0)
    machine.running = 1  # this thread alone
    assert machine.step(2.0) is (TEAM <= (os.cpu_count() or 1))


def test_who_brings_a_request_is_no_neighbour():
    """After others have worked, the client and the event loop still run as a step begins."""
    machine, cores = Machine(), os.cpu_count() or 1
    machine.running, machine.leaving = 1 + cores, cores
    assert machine.step(2.0) is (TEAM <= cores)
    machine.running = 2 + max(0, cores - TEAM) + cores  # one more stays than there is room for
    machine.leaving = cores
    assert not machine.step(2.0)


def test_a_team_that_leaves_processors_free_spins_beside_others():
    machine = Machine()
    assert machine.step(0.9, size=TEAM - 1)


def test_the_second_team_ends_with_what_it_serves():
    before = set(threading.enumerate())
    machine = Machine()
    assert not machine.step(2.0)
    [second] = set(threading.enumerate()) - before
    del machine
    gc.collect()  # its clock refers to it
    second.join(10)
    assert not second.is_alive()


@pytest.mark.skipif(sys.platform != "linux", reason="Linux tells it")
def test_a_busy_process_is_seen_and_this_one_is_not():
    def used(count: int) -> float:
        busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
        before_s, begun_s = others_used_s(), time.perf_counter()
        while time.perf_counter() - begun_s < 0.5:
            sum(range(1000))
        after_s = others_used_s()
        for process in busy:
            process.kill()
            process.wait()
        assert before_s is not None and after_s is not None
        return (after_s - before_s) / (time.perf_counter() - begun_s)

    assert used(2 * CORES) > 0.3 * CORES


def test_what_the_user_has_set_stays():
    environ = {"OMP_WAIT_POLICY": "active", "OMP_NUM_THREADS": "3"}
    configure(environ)
    assert environ == {"OMP_WAIT_POLICY": "active", "OMP_NUM_THREADS": "3"}
    environ = {"GOMP_SPINCOUNT": "7", "OMP_NUM_THREADS": "3"}
    configure(environ)
    assert environ["GOMP_SPINCOUNT"] == "7"


def test_the_spins_are_set_before_torch_is_loaded():
    program = "import engine, os, sys; print(os.environ['GOMP_SPINCOUNT'], 'torch' in sys.modules)"
    environ = {name: value for name, value in os.environ.items() if name != "GOMP_SPINCOUNT"}
    assert ran(program, env=environ).split() == [SPINS, "False"]


@pytest.mark.parametrize(
    ("own", "files", "expected"),
    [
        ("0::/a/b\n", {"a/b/cpu.max": "max 100000", "a/cpu.max": "50000 100000"}, [0.5]),
        ("0::/\n", {"cpu.max": "150000 100000"}, [1.5]),
        ("0::/of/the/host\n", {"cpu.max": "200000 100000"}, [2.0]),
        ("2:cpuacct,cpu:/a\n1:memory:/a\n", OF_VERSION_1, [2.0]),
        ("1:cpu:/\n", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, []),
        ("nonsense\n", {}, []),
        ("0::/\n", {"cpu.max": "what"}, []),
    ],
)
def test_a_quota_of_either_version_of_cgroups_is_found(tmp_path, own, files, expected):
    (tmp_path / "own").write_text(own)
    for name, text in files.items():
        file = tmp_path / "root" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")
    assert list(quotas(tmp_path / "own", tmp_path / "root")) == expected
