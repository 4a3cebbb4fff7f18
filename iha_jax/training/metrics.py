"""Where metrics go: JSON lines always, TensorBoard by option, a progress bar on a terminal."""

import json
import math
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from iha_jax.extras import needed

Values = Mapping[str, float | int | str | None]


class MetricsWriter(Protocol):
    """Something that records the values of a step."""

    def write(self, step: int, values: Values) -> None:
        """Records values under their names."""

    def close(self) -> None:
        """Writes what is still held back."""


class JsonLines:
    """One JSON object a line; ``step`` first. Non-finite numbers are written as strings ("nan", "inf").

    A resumed run continues the file, without the lines after the step it resumes from.
    """

    def __init__(self, path: str | os.PathLike[str], resume_step: int = 0):
        self._path = pathlib.Path(path)
        if self._path.exists():
            kept = [
                line for line in self._path.read_text(errors="replace").splitlines() if _step_of(line) <= resume_step
            ]
            temporary = self._path.with_suffix(".tmp")
            temporary.write_text("".join(line + "\n" for line in kept))
            temporary.replace(self._path)
        self._file = open(self._path, "a", encoding="utf-8")  # noqa: SIM115 (closed by close)

    def write(self, step: int, values: Values) -> None:
        """Appends a line and flushes it."""
        self._file.write(json.dumps({"step": step, **{k: _plain(v) for k, v in values.items()}}) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


class TensorBoard:
    """TensorBoard event files, through tensorboardX."""

    def __init__(self, directory: str | os.PathLike[str], resume_step: int = 0):
        with needed("tensorboardX", "log.tensorboard"):
            import tensorboardX
        # Events after the step resumed from are marked as superseded.
        purge = resume_step + 1 if resume_step else None
        self._writer = tensorboardX.SummaryWriter(str(directory), purge_step=purge)

    def write(self, step: int, values: Values) -> None:
        """Adds a scalar for every number."""
        for name, value in values.items():
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Writes what is held back."""
        self._writer.close()


class Fanout:
    """Several writers as one."""

    def __init__(self, writers: Sequence[MetricsWriter]):
        self._writers = tuple(writers)

    def write(self, step: int, values: Values) -> None:
        """Writes to each."""
        for writer in self._writers:
            writer.write(step, values)

    def close(self) -> None:
        """Closes each."""
        for writer in self._writers:
            writer.close()


def read_json_lines(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The lines of a metrics file; a last one cut off by a kill is left out."""
    lines = pathlib.Path(path).read_text(errors="replace").splitlines()
    return [json.loads(line) for line in lines if _step_of(line) < math.inf]


def _step_of(line: str) -> float:
    try:
        step = json.loads(line)["step"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return math.inf
    return step if isinstance(step, (int, float)) else math.inf


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
