"""The iterator of training batches, with a state of bytes that a checkpoint holds."""

import json

import grain

from iha_jax.data.packing import Row


class BatchIterator:
    """Batches without end; ``get_state`` and ``set_state`` continue exactly after the last one taken."""

    def __init__(self, dataset: grain.IterDataset):
        self._iterator = iter(dataset)

    def __iter__(self) -> "BatchIterator":
        """Itself."""
        return self

    def __next__(self) -> Row:
        """The next batch, arrays [B, T]."""
        return next(self._iterator)

    def get_state(self) -> bytes:
        """The state just after the last batch taken, as JSON; of this process's part."""
        return json.dumps(self._iterator.get_state()).encode()

    def set_state(self, *states: bytes) -> None:
        """Continues from the states of all processes there were then, however many there are now.

        Raises:
          ValueError: the states don't belong together, or are of other data.
        """
        merged, *others = (json.loads(state) for state in states)
        for other in others:
            if other["row"] != merged["row"]:
                raise ValueError(f"processes were saved at different rows of the data: {merged['row']}, {other['row']}")
            merged["lanes"] |= other["lanes"]
        self._iterator.set_state(merged)
        if hasattr(self._iterator, "start_prefetch"):
            self._iterator.start_prefetch()

    def close(self) -> None:
        """Ends the reading thread."""
        self._iterator.close()
