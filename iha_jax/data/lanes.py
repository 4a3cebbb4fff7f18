"""Rows in one global order, whoever reads them: dealt to lanes, so that each process reads little more than its own.

Row g of the run is row ``g // streams`` of lane ``g % streams``. A lane has its own documents of every source and packs
them by itself; its position is kept by its number. Neither knows how many processes there are: a checkpoint of two is
continued by one, or three, with the very next row.
"""

import math
from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol

import grain
import numpy as np

from iha_jax.data.packing import Row

# Shares of sources are kept to this precision: the pattern they are dealt in repeats after so many rows at most.
_SHARES = 10_000


class Lane(Protocol):
    """Endless rows of one source."""

    def take(self) -> Row:
        """The next row."""
        ...

    def skip(self) -> None:
        """Passes over the next row."""

    def get_state(self) -> Any:
        """The position, as JSON."""

    def set_state(self, state: Any) -> None:
        """Continues from a position."""

    def close(self) -> None:
        """Ends what was begun for reading."""


class IteratedLane:
    """Rows made one after the other, by a Grain dataset."""

    def __init__(self, rows: grain.IterDataset):
        self._iterator = iter(rows)

    def take(self) -> Row:
        """The next row."""
        return next(self._iterator)

    def skip(self) -> None:
        """Makes a row for nothing: where the next begins is only known then."""
        next(self._iterator)

    def get_state(self) -> Any:
        """Grain's state."""
        return self._iterator.get_state()

    def set_state(self, state: Any) -> None:
        """Continues from Grain's state."""
        self._iterator.set_state(_tuples(state))

    def close(self) -> None:
        """Closes Grain's iterator."""
        self._iterator.close()


class IndexedLane:
    """Rows that are read by their number."""

    def __init__(self, rows: grain.MapDataset):
        self._rows: Any = rows
        self._next = 0

    def take(self) -> Row:
        """Reads the next row."""
        self._next += 1
        return self._rows[self._next - 1]

    def skip(self) -> None:
        """Reads nothing."""
        self._next += 1

    def get_state(self) -> Any:
        """Number of the next row."""
        return self._next

    def set_state(self, state: Any) -> None:
        """Continues with a row's number."""
        self._next = state

    def close(self) -> None:
        """Nothing is open."""


class LaneBatches(grain.IterDataset):
    """Batches of the rows that one process wants.

    Args:
      open_lane: (source, lane) → its rows, from the first.
      weights: shares of the sources in the rows, up to a factor.
      streams: number of lanes.
      batch: rows of a batch, over all processes.
      own: the rows of each batch, numbers in [0, batch), that are wanted here, in this order.
    """

    def __init__(
        self,
        open_lane: Callable[[int, int], Lane],
        weights: Sequence[float],
        streams: int,
        batch: int,
        own: Sequence[int],
    ):
        super().__init__()
        self._arguments = (open_lane, deal_pattern(weights), len(weights), streams, batch, own)

    def __iter__(self) -> "_Batches":  # pyright: ignore[reportIncompatibleMethodOverride]
        """From the first batch on."""
        return _Batches(*self._arguments)

    def __str__(self) -> str:
        return f"LaneBatches(streams={self._arguments[3]})"


class _Batches(grain.DatasetIterator):
    def __init__(
        self,
        open_lane: Callable[[int, int], Lane],
        pattern: np.ndarray,
        sources: int,
        streams: int,
        batch: int,
        own: Sequence[int],
    ):
        super().__init__()
        self._open, self._pattern, self._sources = open_lane, pattern.tolist(), sources
        self._streams, self._batch = streams, batch
        self._own = {row: place for place, row in enumerate(own)}
        self._lanes: dict[tuple[int, int], Lane] = {}
        self._start_at(0)

    def __next__(self) -> Row:
        rows: list[Any] = [None] * len(self._own)
        for i in range(self._batch):
            turn, number = divmod(self._row + i, self._streams)
            if number not in self._wanted:
                continue
            lane = self._lanes[self._pattern[(turn + number) % len(self._pattern)], number]
            if i in self._own:
                rows[self._own[i]] = lane.take()
            else:
                lane.skip()
        self._row += self._batch
        return {name: np.stack([row[name] for row in rows]) for name in rows[0]}

    def get_state(self) -> dict[str, Any]:
        """The next row's number, and the positions of the lanes read here."""
        lanes = {f"{source}.{number}": lane.get_state() for (source, number), lane in sorted(self._lanes.items())}
        return {"row": self._row, "streams": self._streams, "sources": self._sources, "lanes": lanes}

    def set_state(self, state: dict[str, Any]) -> None:
        """Continues from a state, which may hold more lanes than are read here."""
        for name, now in (("streams", self._streams), ("sources", self._sources)):
            if state[name] != now:
                raise ValueError(
                    f"the checkpoint's position in the data is of {state[name]} {name}, and data.{name} has {now} now: "
                    "set it back, or start another run"
                )
        self._start_at(state["row"])
        for (source, number), lane in self._lanes.items():
            if f"{source}.{number}" not in state["lanes"]:
                raise ValueError(f"the checkpoint's position in the data lacks lane {number} of source {source}")
            lane.set_state(state["lanes"][f"{source}.{number}"])

    def close(self) -> None:
        """Closes the lanes."""
        super().close()
        for lane in self._lanes.values():
            lane.close()

    def __str__(self) -> str:
        return f"LaneBatchesIterator(streams={self._streams})"

    def _start_at(self, row: int) -> None:
        self._row = row
        self._wanted = lanes_of(self._own, row, self._batch, self._streams)
        wanted = {(source, number) for source in range(self._sources) for number in self._wanted}
        for key in self._lanes.keys() - wanted:
            self._lanes.pop(key).close()
        for key in sorted(wanted - self._lanes.keys()):
            self._lanes[key] = self._open(*key)


def lanes_of(own: Collection[int], first: int, batch: int, streams: int) -> frozenset[int]:
    """The lanes that rows ``own`` of every batch come from, the first batch beginning at row ``first`` of the run."""
    period = math.gcd(batch, streams)
    residues = {(first + row) % period for row in own}
    return frozenset(number for number in range(streams) if number % period in residues)


def deal_pattern(weights: Sequence[float]) -> np.ndarray:
    """The source of each row in turn, int [n], repeated for ever: every stretch of it is close to the shares."""
    total = sum(weights)
    shares = np.array([max(1, round(_SHARES * weight / total)) for weight in weights])
    shares //= np.gcd.reduce(shares)
    pattern, given = [], np.zeros(len(weights), np.int64)
    for i in range(1, int(shares.sum()) + 1):
        behind = int(np.argmax(i * shares - given * shares.sum()))
        given[behind] += 1
        pattern.append(behind)
    return np.array(pattern)


def _tuples(state: Any) -> Any:
    """Slices as tuples again.

    Grain's concat-then-split packing tells "no remainder" by comparing with the tuple (-1, -1). JSON has lists
    only; taken as they come, they make it drop a document and shift all rows after the restore.
    """
    if isinstance(state, dict):
        restored = {name: _tuples(value) for name, value in state.items()}
        if isinstance(restored.get("remainder_slices"), dict):
            restored["remainder_slices"] = {k: tuple(v) for k, v in restored["remainder_slices"].items()}
        return restored
    if isinstance(state, list):
        return [_tuples(value) for value in state]
    return state
