"""Calling ``gcloud``, and what its errors mean."""

import contextlib
import enum
import os
import shlex
import signal
import subprocess
from collections.abc import Sequence


class Kind(enum.Enum):
    """What can be done about an error of ``gcloud``."""

    NOT_FOUND = "there is no such thing"
    EXISTS = "there already is one"
    EXHAUSTED = "no quota or no capacity: may pass"
    TRANSIENT = "the service or the way to it is disturbed: will pass"
    PERMANENT = "wrong arguments, rights or project: trying again changes nothing"


# Searched in this order in what gcloud prints, in lower case.
_SIGNS = (
    (
        Kind.PERMANENT,
        ("permission_denied", "unauthenticated", "invalid_argument", "invalid choice", "unrecognized arg"),
    ),
    (Kind.EXISTS, ("already_exists", "already exists")),
    (Kind.EXHAUSTED, ("resource_exhausted", "quota", "stockout", "no more capacity", "insufficient capacity")),
    (Kind.NOT_FOUND, ("not_found", "not found")),
    (
        Kind.TRANSIENT,
        (
            "unavailable",
            "deadline_exceeded",
            "internal error",
            "aborted",
            "timed out",
            "timeout",
            "connection",
            "temporar",
            "unable to reach",
            "ssl",
            "http 5",
            "error 5",
        ),
    ),
)


class GcloudError(RuntimeError):
    """A call of ``gcloud`` failed.

    Attributes:
      kind: what can be done about it.
      output: what the call had printed on its standard output.
    """

    def __init__(self, kind: Kind, message: str, output: str = ""):
        super().__init__(message)
        self.kind = kind
        self.output = output


class Gcloud:
    """Runs ``gcloud`` in a project and zone.

    Attributes:
      zone: of everything asked for.
      project: None leaves it to gcloud's own configuration.
    """

    def __init__(self, zone: str, project: str | None = None):
        self.zone = zone
        self.project = project

    def command(self, *arguments: str) -> list[str]:
        """The whole command line of a call."""
        project = [] if self.project is None else [f"--project={self.project}"]
        return ["gcloud", *arguments, f"--zone={self.zone}", *project, "--quiet"]

    def run(self, *arguments: str, timeout: float | None = 300, echo: bool = False) -> str:
        """What a call prints on its standard output.

        Args:
          *arguments: after "gcloud", without zone and project.
          timeout: seconds after which the call counts as failed for a passing reason.
          echo: leave its standard error on the terminal, for calls whose progress is to be seen.

        Raises:
          GcloudError: gcloud is not installed, or the call failed.
        """
        command = self.command(*arguments)
        shown = " ".join(command[:6])
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=None if echo else subprocess.PIPE,
                text=True,
                errors="replace",
                start_new_session=True,
            )
        except FileNotFoundError:
            raise GcloudError(
                Kind.PERMANENT,
                "gcloud is not on the PATH: install the Google Cloud CLI (https://cloud.google.com/sdk/docs/install) "
                "and run 'gcloud auth login'",
            ) from None
        try:
            output, errors = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            output = _kill(process)
            raise GcloudError(
                Kind.TRANSIENT, f"'{shown} ...' did not answer in {timeout:.0f} s (timed out)", output
            ) from None
        except BaseException:
            _kill(process)
            raise
        if process.returncode:
            errors = (errors or "").strip()
            last = errors[-2000:] or f"exit status {process.returncode}"
            raise GcloudError(kind_of(errors), f"'{shown} ...' failed: {last}", output)
        return output


def _kill(process: subprocess.Popen[str]) -> str:
    """Ends gcloud and the ssh processes it started, which would hold its pipes; what it had printed."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    return process.communicate()[0]


def kind_of(errors: str) -> Kind:
    """What can be done about an error, by what was printed; what is not recognised is permanent."""
    text = errors.lower()
    for kind, signs in _SIGNS:
        if any(sign in text for sign in signs):
            return kind
    return Kind.PERMANENT


def quoted(command: Sequence[str]) -> str:
    """A command as a POSIX shell reads it."""
    return shlex.join(command)
