"""Programs that go wrong in every way end, and it is said how."""

import dataclasses
import os
import sys
import time

import pytest

from iha_jax.evaluation.code_execution import Execution, Limits, containment, run_all, run_code

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs Unix limits")

LIMITS = Limits(wall_seconds=20, cpu_seconds=20, memory_bytes=300 << 20, file_bytes=1 << 20, disk_bytes=8 << 20)


def run(source, **limits):
    return run_code(source, dataclasses.replace(LIMITS, **limits))


def alive(marker):
    """Processes that have a text in their command."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/cmdline", "rb") as file:
                if marker in file.read():
                    found.append(pid)
        except OSError:
            continue
    return found


def test_what_passes_and_what_fails():
    done = run("import math\nassert math.gcd(12, 18) == 6\nprint('six', 'öäü')")
    assert (done.outcome, done.detail, done.output) == ("passed", "", "six öäü\n")
    assert done.passed
    failed = run("x = 1\n\nassert x == 2, 'no'")
    assert (failed.outcome, failed.detail) == ("failed", "line 3: AssertionError: no")
    assert not failed.passed
    assert run("def (").outcome == "failed"
    assert run("f = lambda: f()\nf()").detail.endswith("maximum recursion depth exceeded")
    assert run("import ctypes\nctypes.string_at(0)").detail == "killed by signal 11"


@pytest.mark.parametrize(
    ("source", "outcome"),
    [
        ("while True: print('x' * 1000)", "too much output"),
        ("with open('a', 'wb') as f:\n  while True: f.write(b'x' * 100_000)", "too much output"),
        ("for i in range(10**6): open(f'{i}', 'wb').write(b'x' * 1_000_000)", "too much output"),
        ("x = []\nwhile True: x.append(bytearray(10**7))", "out of memory"),
        ("import os\nos._exit(0)", "exited"),
        ("import sys\nsys.exit()", "exited"),
        ("import os\nwhile True: os.fork()", "too many processes"),
        # What a fork says where the kernel's own limit is in force, that is not for root.
        ("raise BlockingIOError(11, 'Resource temporarily unavailable')", "too many processes"),
    ],
)
def test_programs_without_measure(source, outcome):
    begun = time.monotonic()
    assert run(source).outcome == outcome
    assert time.monotonic() - begun < 20  # not by waiting for the end of its time


def test_endless_programs():
    assert run("while True: pass", wall_seconds=1).outcome == "timed out"
    assert run("import time\ntime.sleep(60)", wall_seconds=0.5).detail == "still running after 0.5 s"
    spun = run("while True:\n  try:\n    while True: pass\n  except BaseException: pass", cpu_seconds=1)
    assert (spun.outcome, spun.detail) == ("timed out", "out of CPU time")


def test_memory_counts_for_all_processes_together():
    source = (
        "import os, time\nfor i in range(4):\n  if os.fork() == 0:\n    x = bytearray(b'x') * (100 << 20)\n"
        "    time.sleep(30)\ntime.sleep(30)"
    )
    assert run(source).outcome == "out of memory"


def test_nobody_stays_behind():
    # A child in a session of its own, whose parent is gone. Nobody else sleeps for so long.
    marker = f"61.{os.getpid()}"
    source = (
        "import os, time\nif os.fork() == 0:\n  os.setsid()\n  if os.fork() == 0:\n"
        f"    os.execv('/bin/sleep', ['sleep', '{marker}'])\n  os._exit(0)\ntime.sleep(0.3)\nprint('done')"
    )
    assert run(source).outcome == "passed"
    assert not alive(marker.encode())


def test_files_elsewhere_stay_what_they_are(tmp_path):
    kept = tmp_path / "kept"
    kept.write_text("as it was")
    inside = "open('a', 'w').write('1')\nimport os\nos.mkdir('d')\nos.rename('a', 'd/b')\nos.remove('d/b')"
    assert run(inside).passed
    # Temporary files are its own, the null device is everybody's.
    assert run("import tempfile\ntempfile.TemporaryFile().write(b'x')\nopen('/dev/null', 'w').write('x')").passed
    sources = [
        f"open({str(kept)!r}, 'w')",
        f"try:\n  open({str(kept)!r}, 'a').write('x')\nexcept OSError: pass",  # it need not admit it
        f"import os\nos.remove({str(kept)!r})",
        f"import os\nos.symlink({str(kept)!r}, 'link')\nopen('link', 'w')",
        f"import os\nos.chdir({str(tmp_path)!r})\nopen('new', 'w')",
        f"import shutil\nshutil.rmtree({str(tmp_path)!r})",
        f"import os\nos.rename('program.py', {str(tmp_path / 'new')!r})",
    ]
    for source in sources:
        done = run(source)
        assert done.outcome == "wrote outside", (source, done)
        assert str(tmp_path) in done.detail
    assert os.listdir(tmp_path) == ["kept"]
    assert kept.read_text() == "as it was"


def test_what_the_kernel_refuses_where_it_can(tmp_path):
    if "writes refused by the kernel" not in containment():
        pytest.skip("this system has no Landlock")
    kept = tmp_path / "kept"
    kept.write_text("as it was")
    for source in (
        f"import ctypes\nassert ctypes.CDLL(None).unlink({os.fsencode(kept)!r}) == -1",
        f"import subprocess\nassert subprocess.run(['/bin/sh', '-c', 'echo x > {kept}'], stderr=-3).returncode",
    ):
        assert run(source).passed
    assert kept.read_text() == "as it was"


def test_no_network_where_the_system_can_do_without():
    if "no network" not in containment():
        pytest.skip("this system grants no network namespace")
    source = "import socket\nassert socket.if_nameindex() == [(1, 'lo')]\nsocket.create_connection(('127.0.0.1', 9), 1)"
    assert run(source).outcome == "failed"


def test_other_processes_are_out_of_reach():
    source = (
        f"import os\nfor pid in (os.getppid(), {os.getpid()}):\n"
        "  try: os.kill(pid, 0)\n  except OSError: continue\n  print(pid)"
    )
    done = run(source)
    assert done.passed
    if "own process numbers" in done.containment:
        assert str(os.getpid()) not in done.output.split()


def test_surroundings(monkeypatch):
    monkeypatch.setenv("SECRET", "1")
    source = (
        "import os, sys\nassert set(os.environ) == {'TMPDIR', 'HOME'}\nassert os.listdir() == ['program.py']\n"
        "assert sys.stdin.read() == ''\nassert sys.flags.isolated\nassert __name__ == '__main__'"
    )
    assert run(source) == Execution("passed", containment=containment())


def test_many_programs_in_order():
    done = run_all(["assert False", "pass", "import os\nos._exit(3)"], LIMITS)
    assert [one.outcome for one in done] == ["failed", "passed", "exited"]
    assert done[2].detail == "ended before the tests did, with status 3"


def test_wrong_limits():
    with pytest.raises(ValueError, match=r"Limits\.processes must be positive, got 0"):
        Limits(processes=0)
