"""The iterator of training batches, with a state of bytes that a checkpoint holds."""

import json
from typing import Any

import grain

from iha_jax.data.packing import Row


class BatchIterator:
    """Batches without end; ``get_state`` and ``set_state`` continue exactly after the last one taken.

    Orbax saves it through Grain's handler, as an iterator whose state is bytes.
    """

    def __init__(self, dataset: grain.IterDataset):
        self._iterator = iter(dataset)

    def __iter__(self) -> "BatchIterator":
        """Itself."""
        return self

    def __next__(self) -> Row:
        """The next batch, arrays [B, T]."""
        return next(self._iterator)

    def get_state(self) -> bytes:
        """The state just after the last batch taken, as JSON."""
        return json.dumps(self._iterator.get_state()).encode()

    def set_state(self, state: bytes) -> None:
        """Continues from a state of the same configuration."""
        self._iterator.set_state(_tuples(json.loads(state)))

    def start_prefetch(self) -> None:
        """Begins reading ahead; Grain's handler calls it after a restore."""
        if hasattr(self._iterator, "start_prefetch"):
            self._iterator.start_prefetch()

    def close(self) -> None:
        """Ends the reading thread."""
        self._iterator.close()


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
