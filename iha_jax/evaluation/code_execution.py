"""Runs programs that nobody has read, one at a time, in a process with limits.

    run_code("assert 1 + 1 == 2").passed

What this contains and what not is the subject of docs/evaluation.md: on Linux it takes a program that goes wrong, and
most that mean harm, but it is no wall against one that attacks the kernel. Measure models you don't trust in a virtual
machine.
"""

import dataclasses
import functools
import json
import pathlib
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Literal, get_args

Outcome = Literal[
    "passed",
    "failed",
    "timed out",
    "out of memory",
    "too much output",
    "too many processes",
    "exited",
    "wrote outside",
]
"""How a program ended: without an exception; with one; stopped by a limit; by its own exit before the end; or having
tried to change a file outside its directory, whatever else it did."""

_SUPERVISOR = pathlib.Path(__file__).with_name("supervisor.py")
_STARTING_SECONDS = 30
"""Beyond a program's own time, for a busy machine to start and to end the supervisor."""


@dataclasses.dataclass(frozen=True)
class Limits:
    """What a program may use.

    Attributes:
      wall_seconds: from start to end.
      cpu_seconds: whole seconds of each of its processes.
      memory_bytes: address space of each process, and private memory of all together.
      file_bytes: of each file it writes.
      disk_bytes: of all its files together.
      output_bytes: of its output; what is beyond ends it.
      processes: at once, itself included.
    """

    wall_seconds: float = 10.0
    cpu_seconds: int = 10
    memory_bytes: int = 1 << 30
    file_bytes: int = 16 << 20
    disk_bytes: int = 64 << 20
    output_bytes: int = 1 << 16
    processes: int = 8

    def __post_init__(self):
        """Checks.

        Raises:
          ValueError: a limit that isn't positive.
        """
        for name, value in dataclasses.asdict(self).items():
            if not value > 0:
                raise ValueError(f"Limits.{name} must be positive, got {value!r}")


@dataclasses.dataclass(frozen=True)
class Execution:
    """How a program ended.

    Attributes:
      outcome: in one word or two.
      detail: the exception and its line, or which limit it was.
      output: the start of what it wrote to its output and error output.
      containment: what was in force beyond limits, in words; empty where the system offers nothing.
    """

    outcome: Outcome
    detail: str = ""
    output: str = ""
    containment: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        """Whether it ran to its end without an exception and within all limits."""
        return self.outcome == "passed"


def run_code(source: str, limits: Limits = Limits()) -> Execution:
    """Runs a Python program to its end or its limits.

    It gets an empty directory of its own as working directory, no environment, no input, and isolated mode
    (``python -I``) of the running interpreter.

    Args:
      source: the program, tests included.
      limits: what it may use.

    Raises:
      RuntimeError: it could not be run at all.
    """
    scratch = tempfile.mkdtemp(prefix="iha_jax-program-")
    try:
        asked = json.dumps({"source": source, "scratch": scratch, **dataclasses.asdict(limits)})
        done = subprocess.run(
            [sys.executable, "-I", str(_SUPERVISOR)],
            input=asked.encode("utf-8", errors="surrogatepass"),
            capture_output=True,
            env={},
            cwd=scratch,
            start_new_session=True,
            timeout=limits.wall_seconds + _STARTING_SECONDS,
            check=False,
        )
        found = json.loads(done.stdout)
    except subprocess.TimeoutExpired:
        return Execution("timed out", "its supervisor had to be stopped")
    except json.JSONDecodeError as error:
        told = done.stderr.decode(errors="replace").strip().splitlines()
        raise RuntimeError(f"the supervisor of a program failed: {told[-1] if told else 'without a word'}") from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    assert found["outcome"] in get_args(Outcome)
    return Execution(found["outcome"], found["detail"], found["output"], tuple(found["containment"]))


def run_all(sources: Sequence[str], limits: Limits = Limits(), workers: int = 2) -> list[Execution]:
    """Runs programs, ``workers`` at a time; results are in the order of the programs."""
    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(lambda source: run_code(source, limits), sources))


@functools.cache
def containment() -> tuple[str, ...]:
    """What this system offers beyond limits, found by running an empty program."""
    return run_code("").containment
