"""SIGTERM and SIGINT heard at any moment, also while XLA compiles or a save is in flight.

A Python signal handler runs between two bytecodes of the main thread, so it waits for a compilation to
return. The C handler below it does not: it writes the signal's number to a file descriptor at once, and a
thread of its own reads that. Long native calls run in another thread, and the main thread waits for either.

Several processes must stop at the same place, for they save together. All of them pass the same *points* in the same
order: every `StopSignals.check`, and within every `StopSignals.run`. A signal in any of them is told to all; each
answers with the first point at which it can still stop, holds there, and all stop at the last of these.
"""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import TypeVar

from iha_jax.training.processes import Processes

T = TypeVar("T")
_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopRequested(Exception):
    """A signal asked the run to save and exit."""


class StopSignals:
    """Listens for SIGTERM and SIGINT between ``__enter__`` and ``__exit__`` (from the main thread).

    A third SIGINT exits at once without saving.

    Attributes:
      received: name of the first signal, here or in another process, or None.
    """

    def __init__(
        self,
        notify: Callable[[str], None] = lambda text: print(text, flush=True),
        processes: Processes | None = None,
    ):
        self.received: str | None = None
        self._notify = notify
        self._processes = processes or Processes()
        self._point, self._running = 0, False  # the last point passed; whether it is one within `run`
        self._first_possible: int | None = None  # this process's answer to a signal
        self._last: int | None = None  # where all stop
        self._changed = threading.Condition()
        self._abandoned = False
        self._interrupts = 0
        self._previous: dict[int, object] = {}

    def __enter__(self) -> "StopSignals":
        """Takes the signals over."""
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        self._previous_fd = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        # A handler must be set for the C one to be; what is to be done is done by the thread.
        self._previous = {number: signal.signal(number, lambda *_: None) for number in _SIGNALS}
        self._thread = threading.Thread(target=self._listen, name="signals", daemon=True)
        self._thread.start()
        self._processes.watch("stop", self._agree)
        return self

    def __exit__(self, *_: object) -> None:
        """Gives the signals back."""
        signal.set_wakeup_fd(self._previous_fd)
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # pyright: ignore[reportArgumentType]
        os.write(self._write, b"\0")
        self._thread.join()
        os.close(self._read)
        os.close(self._write)

    @property
    def exit_code(self) -> int:
        """128 + the signal's number, as shells report it; 0 if none came."""
        return 0 if self.received is None else 128 + signal.Signals[self.received].value

    def check(self) -> None:
        """Raises ``StopRequested`` if a signal came."""
        with self._changed:
            self._point += 1
            self._stop_if_due()

    def run(self, call: Callable[[], T]) -> T:
        """The result of a long native call, or ``StopRequested`` as soon as a signal comes.

        The call can't be broken off: it is left running, and ``finish`` then ends the process without it. Returns when
        the calls of all processes have: what was compiled may talk across them, and does not wait long for an answer.
        """
        self.check()
        outcome: list[tuple[bool, object]] = []

        def work() -> None:
            try:
                result = (True, call())
                self._processes.share("run", None)
            except BaseException as error:
                result = (False, error)
            with self._changed:
                outcome.append(result)
                self._changed.notify_all()

        thread = threading.Thread(target=work, name="native call", daemon=True)
        with self._changed:
            self._point, self._running = self._point + 1, True
            thread.start()
            self._changed.wait_for(lambda: outcome or self._last is not None)
            self._abandoned = not outcome and self._last == self._point
            if not self._abandoned:
                self._changed.wait_for(lambda: outcome)
            self._running = False
            self._stop_if_due()
        thread.join()
        succeeded, value = outcome[0]
        if not succeeded:
            raise value  # pyright: ignore[reportGeneralTypeIssues]
        return value  # pyright: ignore[reportReturnType]

    def finish(self) -> None:
        """Exits the process with ``exit_code`` if a signal came; call it when everything is saved and closed."""
        if self.received is None:
            return
        if self._abandoned:
            # A thread inside XLA's compiler can neither be joined in useful time nor survive the interpreter.
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(self.exit_code)
        sys.exit(self.exit_code)

    def _listen(self) -> None:
        while number := os.read(self._read, 1)[0]:
            if number not in _SIGNALS:
                continue
            name = signal.Signals(number).name
            self._interrupts += number == signal.SIGINT
            if self._interrupts >= 3:
                os.write(2, b"third SIGINT: exiting without saving\n")
                os._exit(128 + number)
            if self.received is not None:
                self._notify(f"{name} received again: still saving")
            elif self._processes.count == 1:
                self._agree(name)
            else:
                self._processes.post("stop", f"{name} {self._processes.index}")

    def _agree(self, text: str) -> None:
        """Settles where all processes stop, after a signal in one of them: "SIGTERM 3"."""
        name, _, process = text.partition(" ")
        with self._changed:
            self.received = name
            self._first_possible = self._point if self._running else self._point + 1
        if self._processes.first or process == str(self._processes.index):
            by = f" by process {process}" if process else ""
            with contextlib.suppress(OSError):  # nobody reads any more
                self._notify(f"{name} received{by}: saving, then exiting")
        last = max(self._processes.share("stop", self._first_possible))
        with self._changed:
            self._last = last
            self._changed.notify_all()

    def _stop_if_due(self) -> None:
        """At a point, with ``_changed`` held: raises if all stop here; waits while that isn't settled."""
        if self._first_possible is None or self._point < self._first_possible:
            return
        self._changed.wait_for(lambda: self._last is not None)
        if self._point == self._last:
            raise StopRequested(self.received)
