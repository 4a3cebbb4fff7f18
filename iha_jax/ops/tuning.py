"""Tile sizes measured on a device, read where they are present: `python -m iha_jax.ops.tune` writes them.

The table is a JSON file, ``$IHA_JAX_TUNING`` or else ``$XDG_CACHE_HOME/iha_jax/tuning.json`` (``~/.cache`` by
default): for every kind of device, for every problem that was measured, the sizes that were fastest. It is read once
per process. Other sizes change the order of sums, so results change in their last digits: keep the table fixed within
a run that has to be repeated bit for bit.
"""

import contextlib
import contextvars
import dataclasses
import functools
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from iha_jax import sharding
from iha_jax.json_text import parse_json_object
from iha_jax.ops.block_sizes import Sizes

if TYPE_CHECKING:
    from iha_jax.ops.forms import Problem

VERSION = 1
"""Of the file's layout."""

_forced: contextvars.ContextVar[Sizes | None] = contextvars.ContextVar("iha_jax_sizes", default=None)


def sizes_for(problem: "Problem") -> Sizes:
    """The sizes to use for a problem on the device that is traced for: forced, measured, or the default ones.

    Raises:
      ValueError: if the table is not one.
    """
    forced = _forced.get()
    if forced is not None:
        return forced
    table = read(table_path())
    if not table:  # the device is asked for only where there is a choice
        return Sizes()
    return table.get(sharding.device_kind(), {}).get(key_of(problem), Sizes())


@contextlib.contextmanager
def force(sizes: Sizes) -> Iterator[None]:
    """Within it these sizes are used, whatever the table says."""
    token = _forced.set(sizes)
    try:
        yield
    finally:
        _forced.reset(token)


def table_path() -> Path:
    """Where the table is, or would be."""
    named = os.environ.get("IHA_JAX_TUNING")
    if named:
        return Path(named).expanduser()
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser() / "iha_jax" / "tuning.json"


def key_of(problem: "Problem") -> str:
    """How the table names a problem."""
    return " ".join(f"{name}={value}" for name, value in dataclasses.asdict(problem).items())


def add(path: Path, device_kind: str, problem: "Problem", sizes: Sizes) -> None:
    """Puts a measurement in a table, atomically; what else the table has stays.

    Raises:
      ValueError: if the file is there and is not a table.
    """
    devices: dict[str, Any] = json.loads(path.read_text())["devices"] if read(path) else {}
    devices.setdefault(device_kind, {})[key_of(problem)] = dataclasses.asdict(sizes)
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    scratch.write_text(json.dumps({"version": VERSION, "devices": devices}, indent=2) + "\n")
    scratch.replace(path)
    read.cache_clear()


@functools.cache
def read(path: Path) -> dict[str, dict[str, Sizes]]:
    """The table in a file, by kind of device and key of the problem; empty where there is no file.

    Raises:
      ValueError: if the file is not a table.
    """
    try:
        content = parse_json_object(path.read_bytes(), str(path))
        if content["version"] != VERSION:
            raise ValueError(f"its version is {content['version']!r}, expected {VERSION}")
        return {
            device: {key: Sizes(**sizes) for key, sizes in problems.items()}
            for device, problems in content["devices"].items()
        }
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{path} is not a table of tile sizes ({type(error).__name__}: {error}). Delete it, measure again with "
            "python -m iha_jax.ops.tune, or point IHA_JAX_TUNING elsewhere."
        ) from error
