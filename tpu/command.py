"""The command that every worker of a run executes, today and after it was recreated."""

import re
from collections.abc import Sequence

_RUN = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_FIXED = ("--name", "--resume")


def check_run(run: str) -> str:
    """The run id, if the cloud's names can be made of it.

    Raises:
      ValueError: if they can't.
    """
    if not _RUN.fullmatch(run) or len(run) > 40:
        raise ValueError(
            f"a run's name must be at most 40 of a-z, 0-9 and '-', begin with a letter and not end in '-', got {run!r}"
        )
    return run


def training_command(python: str, run: str, arguments: Sequence[str]) -> list[str]:
    """``train.py`` under a fixed run id, resuming what it finds.

    Args:
      python: the interpreter.
      run: the run id, ``train.py``'s ``--name``.
      arguments: of ``train.py``: the config, then overrides.

    Raises:
      ValueError: the id or resuming is set among the arguments, or the run's directory would not outlive a worker.
    """
    check_run(run)
    if not arguments or arguments[0].startswith("-"):
        got = repr(arguments[0]) if arguments else "nothing"
        raise ValueError(f"train.py's arguments begin with the config (-- configs/paper_2b4.py ...), got {got}")
    names = [argument.partition("=")[0] for argument in arguments]
    for name in _FIXED:
        if name in names:
            raise ValueError(f"{name} is fixed by the launcher, so that a recreated run resumes: leave it out (--run)")
    directory = option_value(arguments, "--directory")
    if directory is None or not directory.startswith("/"):
        raise ValueError(
            "--directory must be an absolute path on a file system that all workers see and that outlives them "
            f"(a bucket mounted with --mount, NFS), got {directory!r}"
        )
    return [python, "train.py", *arguments, "--name", run, "--resume", "auto"]


def option_value(arguments: Sequence[str], name: str) -> str | None:
    """Value of the last ``--name value`` or ``--name=value``; None without one."""
    found = None
    for index, argument in enumerate(arguments):
        if argument == name and index + 1 < len(arguments):
            found = arguments[index + 1]
        elif argument.startswith(name + "="):
            found = argument.partition("=")[2]
    return found
