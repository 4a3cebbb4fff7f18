"""One process on a run directory."""

import os
import pathlib
import socket


class RunLock:
    """Holds ``.lock`` in a run's directory; the system releases it however the process ends.

    Raises:
      RuntimeError: on entering, when another process holds it, saying which.
    """

    def __init__(self, directory: str | os.PathLike[str]):
        self._path = pathlib.Path(directory) / ".lock"

    def __enter__(self) -> "RunLock":
        """Takes the lock."""
        import fcntl  # not on Windows, where this package doesn't train

        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(self._path, "a+", encoding="utf-8")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.seek(0)
            holder = self._file.read().strip() or "another process"
            self._file.close()
            raise RuntimeError(
                f"{self._path.parent} is in use by {holder}: wait for it, stop it, or give this run another --name"
            ) from None
        self._file.truncate(0)
        self._file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        self._file.flush()
        return self

    def __exit__(self, *_: object) -> None:
        """Releases it."""
        self._file.close()
