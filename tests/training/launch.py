"""Starts `train.py` in several processes, each with devices of its own, and follows what they print."""

import os
import pathlib
import socket
import subprocess
import sys
import threading

from iha_jax.training.serialization import to_json

ROOT = pathlib.Path(__file__).parents[2]


class Launch:
    """Processes of one run, killed on exit where they still live."""

    def __init__(self, config, count, devices, cache, *arguments):
        path = pathlib.Path(config.directory) / f"{config.name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(to_json(config))
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
            "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
            "JAX_COMPILATION_CACHE_DIR": str(cache),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_NUM_PROCESSES": str(count),
            "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}",
        }
        self.processes = [
            subprocess.Popen(
                [sys.executable, str(ROOT / "train.py"), str(path), "--distributed.process", str(i), *arguments],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for i in range(count)
        ]
        self._seen = threading.Condition()
        self._lines = [[] for _ in self.processes]
        self._readers = [threading.Thread(target=self._read, args=(i,), daemon=True) for i in range(count)]
        for reader in self._readers:
            reader.start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process, reader in zip(self.processes, self._readers, strict=True):
            process.kill()
            process.wait()
            reader.join()
            process.stdout.close()

    def wait_for(self, text, process=0, timeout=600):
        """Returns when a process has printed a line with this text."""

        def found():
            return any(text in line for line in self._lines[process])

        with self._seen:
            self._seen.wait_for(lambda: found() or not self._readers[process].is_alive(), timeout)
            assert found(), self.output(process)

    def finish(self, timeout=600):
        """Exit codes when all have ended."""
        codes = [process.wait(timeout) for process in self.processes]
        for reader in self._readers:
            reader.join()
        return codes

    def output(self, process):
        """What a process has printed up to now."""
        return "".join(self._lines[process])

    def _read(self, i):
        for line in self.processes[i].stdout:
            with self._seen:
                self._lines[i].append(line)
                self._seen.notify_all()
        with self._seen:
            self._seen.notify_all()
