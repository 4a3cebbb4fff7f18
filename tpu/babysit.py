"""Keeping a run alive: asks for the resource, sets it up, launches, watches, and begins again when it is lost."""

import dataclasses
import os
import shlex
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from tpu.gcloud import GcloudError, Kind, quoted
from tpu.package import Package
from tpu.resource import Found, Reply, Request, Resource

T = TypeVar("T")
Log = Callable[[str], None]

# The queue is still at work, or the cloud is.
_WAITING = ("CREATING", "ACCEPTED", "WAITING_FOR_RESOURCES", "PROVISIONING", "SUSPENDING", "DELETING")
_LOST = ("FAILED", "SUSPENDED")
# A node in one of these does not come back by itself.
_NODE_LOST = ("PREEMPTED", "TERMINATED", "STOPPED", "DELETING", "MISSING", "HIDDEN", "UNKNOWN")
# train.py's exit status for a wrong flag or config.
_WRONG_COMMAND = 2


class GiveUpError(RuntimeError):
    """Trying again has been tried often enough, or can't help."""


@dataclasses.dataclass(frozen=True)
class Job:
    """What every worker does.

    Attributes:
      run: the run id: of the state on the workers, and ``train.py``'s ``--name``.
      command: executed in the repository's folder.
      environment: variables of the command.
      mounts: buckets and where they are mounted, ``{"gs://bucket": "/mnt/bucket"}``.
    """

    run: str
    command: tuple[str, ...]
    environment: dict[str, str] = dataclasses.field(default_factory=dict)
    mounts: dict[str, str] = dataclasses.field(default_factory=dict)

    def setup_script(self) -> str:
        """Unpacks the code and installs it; the code is not replaced under a run."""
        mounts = "".join(
            f" && bash iha_jax/tpu/mount.sh {shlex.quote(bucket)} {shlex.quote(folder)}"
            for bucket, folder in self.mounts.items()
        )
        return (
            "rm -rf iha_jax.new && mkdir iha_jax.new && tar -xzf iha_jax.tgz -C iha_jax.new && rm -rf iha_jax && "
            f'mv iha_jax.new iha_jax && bash iha_jax/tpu/setup.sh --venv "$HOME/.iha_jax/venv"{mounts}'
        )

    def launch_script(self, generation: str) -> str:
        """Starts the command, detached."""
        variables = [f"{name}={value}" for name, value in self.environment.items()]
        worker = ["bash", "iha_jax/tpu/worker.sh", "launch", self.run, "--"]
        return quoted(["env", f"TPU_GENERATION={generation}", *variables, *worker]) + f" {self}"

    def __str__(self) -> str:
        """The command as a worker's shell reads it: only that knows the worker's home directory."""
        first, *rest = self.command
        program = f'"$HOME/{first[2:]}"' if first.startswith("~/") else shlex.quote(first)
        return " ".join([program, quoted(rest)]) if rest else program


@dataclasses.dataclass(frozen=True)
class Policy:
    """How patient to be.

    Attributes:
      recreations: how often the resource may be lost, or refused, in a row.
      restarts: how often the command may fail in a row on machines that are well.
      errors: how often gcloud may fail in a row, and how often workers may not answer in a row.
      stable: seconds of running after which the counts begin anew.
      poll: seconds between looks.
      backoff: seconds before the first repetition; doubled for every further one in a row.
      longest_backoff: seconds.
      ssh_timeout: seconds for a question to the workers.
      setup_timeout: seconds for installing on them.
      grace: seconds the command has to save when it is stopped.
    """

    recreations: int = 20
    restarts: int = 5
    errors: int = 10
    stable: float = 1800
    poll: float = 30
    backoff: float = 15
    longest_backoff: float = 600
    ssh_timeout: float = 300
    setup_timeout: float = 1800
    grace: int = 120


def launch(
    resource: Resource, found: Found, job: Job, package: Package, policy: Policy = Policy(), log: Log = print
) -> None:
    """Copies the code to every worker, installs it and starts the command, detached.

    Args:
      resource: active, with nothing of the job running.
      found: how it was described.
      job: what to start.
      package: the code.
      policy: its time-outs.
      log: is told what happens.

    Raises:
      GcloudError: it is not running everywhere now.
    """
    log(f"setting up {found.hosts} workers")
    with tempfile.TemporaryDirectory() as folder:
        file = os.path.join(folder, "iha_jax.tgz")
        package.write(file)
        resource.copy(file, "iha_jax.tgz", policy.setup_timeout)
    resource.ssh(job.setup_script(), policy.setup_timeout, echo=True)
    log(f"launching run {job.run}: {job}")
    resource.ssh(job.launch_script(found.generation), policy.ssh_timeout)


class Babysitter:
    """Follows a run to its end. Knows nothing that the cloud and the workers don't: it may be stopped and begun again.

    Args:
      resource: where it runs.
      request: what to ask for when there is none.
      job: what runs.
      package: the code, the same after every recreation.
      policy: how patient to be.
      log: is told what happens.
      sleep: waits for so many seconds.
      clock: seconds that pass.
    """

    def __init__(
        self,
        resource: Resource,
        request: Request,
        job: Job,
        package: Package,
        policy: Policy = Policy(),
        log: Log = print,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._resource, self._request, self._job, self._package = resource, request, job, package
        self._policy, self._log, self._sleep, self._clock = policy, log, sleep, clock
        self._counts = {"recreations": 0, "restarts": 0, "errors": 0}
        self._silent = 0
        self._running_since: float | None = None
        self._said = ""

    def follow(self) -> None:
        """Returns when the command has ended well on every worker.

        Raises:
          GiveUpError: it can't be brought to its end.
          GcloudError: gcloud refuses for a reason that won't pass.
        """
        while not self._look():
            self._sleep(self._policy.poll)

    def _look(self) -> bool:
        """One look at everything, and what follows from it; whether the run has ended well."""
        found = self._patiently(self._resource.describe)
        if found is None:
            self._running_since = None
            self._create()
            return False
        self._say_once(f"{self._resource.name}: {found.state}")
        if found.state in _LOST:
            self._recreate(f"{found.state}: {found.detail}" if found.detail else found.state)
        elif found.state == "ACTIVE":
            self._check(found)
            states = self._patiently(lambda: self._resource.node_states(found.nodes))
            lost = [f"{node} is {state}" for node, state in states.items() if state in _NODE_LOST]
            if lost:
                self._recreate(", ".join(lost))
            elif all(state == "READY" for state in states.values()):
                return self._attend(found)
            else:
                self._say_once(", ".join(f"{node} is {state}" for node, state in states.items() if state != "READY"))
        elif found.state not in _WAITING:
            self._say_once(f"{self._resource.name}: unknown state {found.state}, waiting")
        return False

    def _attend(self, found: Found) -> bool:
        """Sees to the command on workers that are all there."""
        replies = self._resource.replies(self._job.run, self._policy.ssh_timeout)
        if len(replies) < found.hosts:
            self._silent += 1
            self._log(f"{len(replies)} of {found.hosts} workers answer ({self._silent} of {self._policy.errors})")
            if self._silent >= self._policy.errors:
                self._silent = 0
                self._recreate(f"only {len(replies)} of {found.hosts} workers answer")
            return False
        self._silent = 0
        states = {reply.state for reply in replies}
        if all(reply.state == "EXITED" and reply.code == 0 for reply in replies):
            self._log(f"run {self._job.run} has ended well on {found.hosts} workers")
            return True
        if states <= {"ABSENT", "IDLE"}:
            self._launch(found)
        elif states <= {"RUNNING", "EXITED"} and not any(reply.code for reply in replies):
            self._keep_running()
        else:
            self._restart(found, replies)
        return False

    def _keep_running(self) -> None:
        now = self._clock()
        if self._running_since is None:
            self._running_since = now
            self._log(f"run {self._job.run} is running")
        elif now - self._running_since >= self._policy.stable:
            self._counts = dict.fromkeys(self._counts, 0)

    def _create(self) -> None:
        what = f"{self._request.slices} x {self._request.slice.accelerator_type}"
        self._log(f"asking for {what} as {self._resource.name}")
        try:
            self._patiently(lambda: self._resource.create(self._request))
        except GcloudError as error:
            if error.kind is not Kind.EXHAUSTED:
                raise
            self._spend("recreations", str(error))

    def _recreate(self, reason: str) -> None:
        """Gives the resource back, and waits until its name is free."""
        self._running_since = None
        seconds = self._count("recreations", f"{self._resource.name} is lost ({reason})")
        # First of all: what is left of it costs money.
        self._patiently(self._resource.delete)
        while (found := self._patiently(self._resource.describe)) is not None:
            self._say_once(f"{self._resource.name}: {found.state}")
            if found.state not in ("DELETING", "SUSPENDING"):
                self._patiently(self._resource.delete)
            self._sleep(self._policy.poll)
        self._sleep(seconds)
        self._create()

    def _launch(self, found: Found) -> None:
        """What goes wrong shows at the next look."""
        try:
            launch(self._resource, found, self._job, self._package, self._policy, self._log)
        except GcloudError as error:
            self._spend("restarts", f"it could not be launched everywhere: {error}")

    def _restart(self, found: Found, replies: Sequence[Reply]) -> None:
        """All begin again when one has failed: what is left of the others waits for it in vain."""
        self._running_since = None
        ended = [f"{reply.host} {reply.state}{'' if reply.code is None else f' {reply.code}'}" for reply in replies]
        self._log(f"run {self._job.run} failed: {', '.join(sorted(ended)[:8])}")
        run = shlex.quote(self._job.run)
        worker = "bash iha_jax/tpu/worker.sh"
        self._try_ssh(f"{worker} stop {run} {self._policy.grace} >/dev/null", self._policy.grace + 60)
        self._log(self._try_ssh(f"{worker} log {run} 20", self._policy.ssh_timeout).rstrip())
        if any(reply.code == _WRONG_COMMAND for reply in replies):
            raise GiveUpError(f"the command is wrong (exit status {_WRONG_COMMAND}): {self._job}")
        self._spend("restarts", f"run {self._job.run} failed")
        self._launch(found)

    def _try_ssh(self, script: str, timeout: float) -> str:
        try:
            return self._resource.ssh(script, timeout)
        except GcloudError as error:
            return error.output

    def _check(self, found: Found) -> None:
        """Refuses a resource of the same name that is something else."""
        wanted = (self._request.slice.accelerator_type, self._request.slices)
        there = (found.accelerator_type, len(found.nodes))
        if there != wanted:
            raise GiveUpError(
                f"{self._resource.name} is {there[1]} x {there[0]}, but {wanted[1]} x {wanted[0]} was asked for: "
                "delete it, or choose another name"
            )

    def _patiently(self, call: Callable[[], T]) -> T:
        """The result of a call that may fail in passing."""
        while True:
            try:
                result = call()
            except GcloudError as error:
                if error.kind is not Kind.TRANSIENT:
                    raise
                self._spend("errors", str(error))
            else:
                self._counts["errors"] = 0
                return result

    def _spend(self, what: str, reason: str) -> None:
        """Counts a failure and waits."""
        self._sleep(self._count(what, reason))

    def _count(self, what: str, reason: str) -> float:
        """Counts a failure: seconds to wait before the next attempt, more every time in a row."""
        limit = getattr(self._policy, what)
        self._counts[what] += 1
        count = self._counts[what]
        if count > limit:
            raise GiveUpError(f"{reason}; given up after {limit} {what} in a row")
        seconds = min(self._policy.backoff * 2 ** (count - 1), self._policy.longest_backoff)
        self._log(f"{reason}; {what} {count} of {limit}, in {seconds:.0f} s")
        return seconds

    def _say_once(self, text: str) -> None:
        if text != self._said:
            self._said = text
            self._log(text)
