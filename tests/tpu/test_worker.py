"""One worker's side: what tpu/queued.py relies on."""

import os
import pathlib
import signal
import subprocess
import time

import pytest

WORKER = pathlib.Path(__file__).resolve().parents[2] / "tpu" / "worker.sh"


@pytest.fixture
def worker(tmp_path, programs):
    programs.joinpath("hostname").write_text("#!/bin/sh\necho w\n")
    programs.joinpath("hostname").chmod(0o755)

    def call(*arguments):
        return subprocess.run(
            ["bash", str(WORKER), *arguments], capture_output=True, text=True, env={**os.environ, "HOME": str(tmp_path)}
        )

    yield call
    call("stop", "r", "0")


def status(worker, *wanted):
    limit = time.monotonic() + 20
    while (found := worker("status", "r").stdout.split()[2:]) != list(wanted):
        assert time.monotonic() < limit, f"{found} is not {wanted}"
        time.sleep(0.02)


def alive(process):
    """Whether it is there and not only waiting to be reaped."""
    try:
        return pathlib.Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_run_is_launched_once_and_ends_with_its_status(worker, tmp_path):
    status(worker, "IDLE")
    command = ("--", "sh", "-c", f"echo hello; while [ ! -f {tmp_path}/end ]; do sleep 0.05; done; exit 7")
    for _ in range(2):
        assert worker("launch", "r", *command).stdout == "iha-worker w RUNNING\n"
    status(worker, "RUNNING")
    other = worker("launch", "r", "--", "true")
    assert other.returncode == 3
    assert "is running another command here: sh -c" in other.stderr
    (tmp_path / "end").touch()
    status(worker, "EXITED", "7")
    log = worker("log", "r").stdout
    assert log.count("\nhello\n") == 1
    assert "exit status 7" in log
    worker("launch", "r", "--", "true")
    status(worker, "EXITED", "0")


def test_a_run_without_a_status_is_lost_and_its_rest_is_killed_before_the_next(worker, tmp_path):
    worker("launch", "r", "--", "sh", "-c", f"echo $$ >{tmp_path}/child; sleep 60")
    limit = time.monotonic() + 20
    while not (tmp_path / "child").exists() or not (tmp_path / "child").read_text():
        assert time.monotonic() < limit
        time.sleep(0.02)
    child = int((tmp_path / "child").read_text())
    os.kill(int((tmp_path / ".iha_jax/runs/r/pid").read_text()), signal.SIGKILL)
    status(worker, "LOST")
    assert alive(child)
    worker("launch", "r", "--", "true")
    status(worker, "EXITED", "0")
    while alive(child):
        assert time.monotonic() < limit
        time.sleep(0.02)


def test_stopping_asks_first_and_kills_then(worker):
    worker("launch", "r", "--", "bash", "-c", 'trap "echo saved; exit 143" TERM; while :; do sleep 0.05; done')
    time.sleep(0.2)
    assert worker("stop", "r", "20").stdout == "iha-worker w EXITED 143\n"
    assert "saved" in worker("log", "r").stdout
    worker("launch", "r", "--", "bash", "-c", 'trap "" TERM; while :; do sleep 0.05; done')
    assert worker("stop", "r", "0").stdout in ("iha-worker w LOST\n", "iha-worker w RUNNING\n")
    status(worker, "LOST")


def test_wrong_arguments_print_the_usage(worker):
    for arguments in ((), ("launch", "r"), ("launch", "r", "--"), ("dance", "r")):
        done = worker(*arguments)
        assert done.returncode == 2
        assert "launch RUN -- COMMAND" in done.stderr
