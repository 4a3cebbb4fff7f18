"""Train a language model: ``python train.py configs/tiny.py``; ``--help`` after the config lists its values."""

import contextlib
import logging
import sys

from iha_jax.training.checkpoint import one_error_per_failed_save
from iha_jax.training.cli import parse
from iha_jax.training.lock import RunLock
from iha_jax.training.loop import Trainer
from iha_jax.training.processes import Processes, connected
from iha_jax.training.signals import StopRequested, StopSignals


def main() -> None:
    """Runs what the command line asks for; stopped by a signal, it saves, and the same command resumes."""
    config = parse(sys.argv[1:])
    sys.stdout.reconfigure(line_buffering=True)  # pyright: ignore[reportAttributeAccessIssue] (a log file is followed)
    logging.basicConfig(format="%(levelname)s: %(message)s", level=logging.WARNING)
    one_error_per_failed_save()
    processes = Processes()
    try:
        processes = connected(config.distributed)
        lock = RunLock(config.run_directory) if processes.first else contextlib.nullcontext()
        with StopSignals(processes=processes) as stop, lock:
            trainer = Trainer(config, stop, processes=processes)
            try:
                trainer.resume()
                trainer.compile()
                trainer.train()
                trainer.finish()
            except StopRequested:
                pass  # the trainer has saved
            except Exception as error:
                processes.abandon(error)  # at once: closing would wait for the others
                raise
            finally:
                trainer.close()
        processes.close()
        stop.finish()
    except (ValueError, OSError, RuntimeError, ImportError) as error:
        processes.abandon(error)
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
