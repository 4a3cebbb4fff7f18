"""The processes of a run: found and connected, told of each other's signals and failures.

They talk through the key-value store of `jax.distributed`'s coordination service, beside the devices: a message gets
through while another process compiles, waits for a collective that never comes, or writes a checkpoint.
"""

import collections
import dataclasses
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

import jax

from iha_jax import compat
from iha_jax.training.config import DistributedConfig

_PREFIX = "iha_jax"
_FOREVER_MS = 10**9
# Errors that are a sentence for the user; of others the traceback is shown.
_EXPECTED = (ValueError, OSError, RuntimeError, ImportError)


class Processes:
    """One process alone; `connected` makes the run of several.

    Attributes:
      index: of this process.
      count: of all processes.
    """

    index = 0
    count = 1

    @property
    def first(self) -> bool:
        """Whether this is the one that prints, and writes everything but its part of a checkpoint."""
        return self.index == 0

    def share(self, topic: str, value: Any) -> list[Any]:
        """Every process's value, by its number. All must call it, for each topic as many times.

        Args:
          topic: what it is about.
          value: anything JSON.
        """
        return [value]

    def post(self, topic: str, text: str) -> None:
        """Gives all processes, this one too, the first text of a topic; later ones are dropped."""

    def watch(self, topic: str, heard: Callable[[str], None]) -> None:
        """Calls a function with the text of a topic, if one is posted, in a thread of its own."""

    def abandon(self, error: BaseException) -> None:
        """Ends this process and all others over an error here; returns where there are no others."""

    def close(self) -> None:
        """Parts from the others, who must close, too."""


def connected(config: DistributedConfig) -> Processes:
    """All processes of the run, connected; call it before anything touches a device.

    Raises:
      ValueError: one of the three values is missing, or isn't a number.
      RuntimeError: JAX recognises a cluster, but can't make it out.
    """
    given = _given(config)
    if config.mode == "never":
        return Processes()
    if given is None:
        try:
            count = compat.cluster_processes()
        except OSError:  # no metadata server: a TPU, but none of Google Cloud's pods
            count = None
        except Exception as error:
            raise RuntimeError(
                f"this looks like a cluster, but its processes can't be made out ({type(error).__name__}: {error}): "
                "give --distributed.coordinator, processes and process, or --distributed.mode never to run alone"
            ) from error
        if count is None or count == 1:
            return Processes()
    elif given["num_processes"] == 1:
        return Processes()
    _connect(config, given or {})
    return _Connected(config.heartbeat_timeout)


def _given(config: DistributedConfig) -> dict[str, Any] | None:
    """What `jax.distributed.initialize` is told, by the configuration or the environment; None, nothing."""
    values: dict[str, Any] = {}
    for name, value, variable, kind in (
        ("coordinator", config.coordinator, "JAX_COORDINATOR_ADDRESS", str),
        ("processes", config.processes, "JAX_NUM_PROCESSES", int),
        ("process", config.process, "JAX_PROCESS_ID", int),
    ):
        text = os.environ.get(variable)
        try:
            values[name] = value if value is not None else None if not text else kind(text)
        except ValueError:
            raise ValueError(f"{variable} must be a number, got {text!r}") from None
    missing = [name for name, value in values.items() if value is None]
    if len(missing) == 3 or (missing == ["processes", "process"] and config.coordinator is None):
        return None  # the address alone, in the environment, is for the clusters that JAX recognises
    if missing:
        raise ValueError(
            f"distributed.{' and distributed.'.join(missing)} must be given, too: coordinator, processes and process "
            f"belong together, got { ({k: v for k, v in values.items() if v is not None}) }"
        )
    checked = dataclasses.replace(config, **values)
    address = str(checked.coordinator)
    if not address.rpartition(":")[2].isdigit() or ":" not in address:
        raise ValueError(f"distributed.coordinator must be host:port, as '10.0.0.2:8476', got {address!r}")
    return {
        "coordinator_address": address,
        "num_processes": checked.processes,
        "process_id": checked.process,
        "cluster_detection_method": "deactivate",
    }


def _connect(config: DistributedConfig, given: dict[str, Any]) -> None:
    where = given.get("coordinator_address", "the coordinator that the cluster names")
    who = f"process {given['process_id']} of {given['num_processes']}" if given else "a process of the cluster"

    def give_up() -> None:
        # JAX would abort from C++ with a stack trace.
        _print_error(
            f"{who} waited {config.start_timeout} s (distributed.start_timeout) for the others at {where}. Check that "
            "every worker runs this same command, that the number of processes is right and each has a number of its "
            "own, that process 0 runs at that address, and that its port is free there and open to the others"
        )
        os._exit(1)

    waiting = threading.Timer(config.start_timeout, give_up)
    waiting.daemon = True
    waiting.start()
    try:
        jax.distributed.initialize(
            **given,
            initialization_timeout=config.start_timeout + 30,
            # A dead process is noticed by `_Connected`, which says so; JAX's own notice is the second line.
            heartbeat_timeout_seconds=config.heartbeat_timeout + max(5, config.heartbeat_timeout // 4),
        )
    finally:
        waiting.cancel()


class _Connected(Processes):
    """Several processes, after `jax.distributed.initialize`."""

    def __init__(self, heartbeat_timeout: float):
        self._client = compat.coordination_client()
        self.index, self.count = jax.process_index(), jax.process_count()
        self._shared: collections.Counter[str] = collections.Counter()
        self._topics: list[str] = []
        self._threads: list[threading.Thread] = []
        self._leaving = threading.Event()
        self._ending = threading.Lock()
        self._timeout = heartbeat_timeout
        self.watch("failed", lambda text: self._end(text))
        self._start(self._beat)

    def share(self, topic: str, value: Any) -> list[Any]:
        self._shared[topic] += 1
        key = self._key("share", topic, self._shared[topic])
        self._client.key_value_set(f"{key}/{self.index}", json.dumps(value))
        keys = (f"{key}/{i}" for i in range(self.count))
        return [json.loads(self._client.blocking_key_value_get(key, _FOREVER_MS)) for key in keys]

    def post(self, topic: str, text: str) -> None:
        for i in range(self.count):
            try:
                self._client.key_value_set(self._key(topic, i), json.dumps(text))
            except Exception as error:
                if "ALREADY_EXISTS" not in str(error):
                    raise

    def watch(self, topic: str, heard: Callable[[str], None]) -> None:
        self._topics.append(topic)

        def wait() -> None:
            try:
                text = json.loads(self._client.blocking_key_value_get(self._key(topic, self.index), _FOREVER_MS))
            except Exception:
                return  # the service is gone, and JAX ends the process over it
            if text is None:
                return
            try:
                heard(text)
            except Exception as error:
                self.abandon(error)  # the others may be waiting for an answer

        self._start(wait)

    def abandon(self, error: BaseException) -> None:
        if not isinstance(error, _EXPECTED):
            traceback.print_exception(error)
        text = str(error)
        if isinstance(error, jax.errors.JaxRuntimeError):  # a connection that breaks off, for one
            text += "\nIf another process died, its own output says why; the same command, given to all again, resumes"
        self._end(text, own=True)

    def close(self) -> None:
        self.share("leaving", None)  # nobody posts anything any more
        self._leaving.set()
        for topic in self._topics:  # a thread inside the client would not survive the interpreter
            try:
                self._client.key_value_set(self._key(topic, self.index), "null")
            except Exception as error:
                if "ALREADY_EXISTS" not in str(error):
                    raise
        for thread in self._threads:
            thread.join()
        jax.distributed.shutdown()

    def _beat(self) -> None:
        """Says every now and then that this process lives; process 0 notes who doesn't."""
        seen: dict[str, tuple[str, float]] = {}
        beats = 0
        while not self._leaving.wait(self._timeout / 5):
            beats += 1
            try:
                self._client.key_value_set(self._key("beat", self.index), str(beats), allow_overwrite=True)
                if self.first:
                    for key, value in self._client.key_value_dir_get(self._key("beat")):
                        if seen.get(key, ("",))[0] != value:
                            seen[key] = (value, time.monotonic())
            except Exception:
                return  # the service is gone, and JAX ends the process over it
            silent = [int(k.rpartition("/")[2]) for k, (_, at) in seen.items() if time.monotonic() - at > self._timeout]
            if silent and not self._leaving.is_set():
                names = " and ".join(str(i) for i in sorted(silent))
                self._end(
                    f"process {names} is gone: nothing heard for {self._timeout} s (distributed.heartbeat_timeout). "
                    "All stop; the same command, given to all again, resumes from the last checkpoint",
                    own=True,
                    gone=frozenset(silent),
                )

    def _end(self, text: str, own: bool = False, gone: frozenset[int] = frozenset()) -> None:
        """Prints and exits; process 0 last, since the store is there."""
        with self._ending:  # whoever comes second waits here until the process is over
            _print_error(text)
            try:
                if own:
                    self.post("failed", text if gone else f"process {self.index}: {text}")
                self._client.key_value_set(self._key("over", self.index), "")
                if self.first:
                    deadline = time.monotonic() + min(10.0, self._timeout)
                    for i in set(range(self.count)) - {0} - gone:
                        left = max(1, int(1000 * (deadline - time.monotonic())))
                        self._client.blocking_key_value_get(self._key("over", i), left)
            except Exception:
                pass  # the others will notice that this process is gone
            os._exit(1)

    def _start(self, work: Callable[[], None]) -> None:
        thread = threading.Thread(target=work, name="processes", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _key(self, *parts: object) -> str:
        return "/".join((_PREFIX, *map(str, parts)))


def _print_error(text: str) -> None:
    sys.stdout.flush()
    print(f"error: {text}", file=sys.stderr, flush=True)
