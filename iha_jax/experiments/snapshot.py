"""Files that are whole or not there: results, and the state of a run."""

import json
import os
import pathlib
import time
from collections.abc import Callable
from typing import Any, BinaryIO

import jax
import jax.numpy as jnp
import numpy as np

from iha_jax.json_text import parse_json_object

_META = "meta"

_SECONDS_BETWEEN = 5
"""What an interruption costs at most, beside the work between two calls of `Snapshots.save`."""


def write_atomically(file: pathlib.Path, write: Callable[[BinaryIO], Any]) -> None:
    """Has a file written under another name and renames it: whatever happens, the file is the old or the new one.

    Args:
      file: where it goes; its directory exists.
      write: is given the open file.
    """
    part = file.with_name(f".{file.name}.{os.getpid()}.part")
    try:
        with part.open("wb") as stream:
            write(stream)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(part, file)
    finally:
        part.unlink(missing_ok=True)


def write_text(file: pathlib.Path, text: str) -> None:
    """The same with a text, in UTF-8."""
    write_atomically(file, lambda stream: stream.write(text.encode()))


def save_snapshot(file: pathlib.Path, state: Any, meta: dict[str, Any]) -> None:
    """Keeps a pytree of arrays and some JSON values."""
    arrays: dict[str, Any] = {str(i): np.asarray(leaf) for i, leaf in enumerate(jax.tree.leaves(state))}
    arrays[_META] = np.asarray(json.dumps(meta))
    write_atomically(file, lambda stream: np.savez(stream, **arrays))


def load_snapshot(file: pathlib.Path, like: Any) -> tuple[Any, dict[str, Any]] | None:
    """What `save_snapshot` kept, on the device; None if there is no such file.

    Raises:
      ValueError: the arrays aren't those of ``like``.
    """
    if not file.exists():
        return None
    leaves, structure = jax.tree.flatten(like)
    stored = load_arrays(file)
    try:
        found = [stored[str(i)] for i in range(len(stored) - 1)]
        meta = parse_json_object(str(stored[_META]), str(file))
    except KeyError as error:
        raise ValueError(f"{file} isn't a snapshot (no {error}): delete it to start again") from error
    if [x.shape for x in found] != [x.shape for x in leaves]:
        raise ValueError(f"{file} is a snapshot of another model: delete it, or choose another output directory")
    return jax.tree.unflatten(structure, [jnp.asarray(x) for x in found]), meta


def load_arrays(file: pathlib.Path) -> dict[str, np.ndarray]:
    """The arrays of an ``.npz`` file; nothing in it is unpickled.

    Raises:
      ValueError: it is damaged.
    """
    try:
        with open(file, "rb") as stream, np.load(stream) as arrays:  # a stream of ours is closed whatever happens
            return {name: arrays[name] for name in arrays.files}
    except FileNotFoundError:
        raise
    except Exception as error:  # NumPy and zipfile raise a dozen kinds for what doesn't parse
        raise ValueError(f"{file} is damaged ({error}): delete it to start again") from error


class Snapshots:
    """The state of a run in one file, written every few seconds at most."""

    def __init__(self, file: pathlib.Path):
        self._file, self._saved = file, time.monotonic()

    def load(self, like: Any) -> tuple[Any, dict[str, Any]] | None:
        """As `load_snapshot`."""
        return load_snapshot(self._file, like)

    def save(self, state: Any, meta: dict[str, Any]) -> None:
        """As `save_snapshot`, unless the last one is younger than that."""
        if time.monotonic() - self._saved >= _SECONDS_BETWEEN:
            save_snapshot(self._file, state, meta)
            self._saved = time.monotonic()
