"""A queued resource: one or several slices of TPU virtual machines, asked for, found, used and given back."""

import dataclasses
import json
import re
import shlex
from typing import Any

from tpu.command import check_run
from tpu.gcloud import Gcloud, GcloudError, Kind
from tpu.slices import Slice, describe_accelerator

_RESOURCES = ("compute", "tpus", "queued-resources")
_EVERYWHERE = ("--node=all", "--worker=all")
_REPLY = re.compile(r"^iha-worker (\S+) (\S+) ?(-?\d+)?$", re.MULTILINE)


@dataclasses.dataclass(frozen=True)
class Request:
    """What to ask for.

    Attributes:
      name: of the queued resource; its nodes are called so too.
      slice: of every node.
      slices: how many; more than one talk over the data-centre network.
      spot: cheap, and taken away at any time.
      reserved: from a reservation.
      runtime: image of the machines; None, the generation's.
      network: of the machines; None, the project's default.
      subnetwork: likewise.
      service_account: None, Compute Engine's default one.
      internal_ips: no public addresses (the network needs Cloud NAT, ssh goes through IAP).
      valid_until: gives up waiting after this long ("6h"); None waits for ever.
      extra: further arguments of ``gcloud compute tpus queued-resources create``.
    """

    name: str
    slice: Slice
    slices: int = 1
    spot: bool = False
    reserved: bool = False
    runtime: str | None = None
    network: str | None = None
    subnetwork: str | None = None
    service_account: str | None = None
    internal_ips: bool = False
    valid_until: str | None = None
    extra: tuple[str, ...] = ()

    def __post_init__(self):
        """Checks what gcloud would only refuse later."""
        check_run(self.name)
        if self.slices < 1:
            raise ValueError(f"slices must be at least 1, got {self.slices}")
        if self.spot and self.reserved:
            raise ValueError("spot and reserved exclude each other, got both")

    @property
    def hosts(self) -> int:
        """Workers of all slices together."""
        return self.slice.hosts * self.slices

    def arguments(self) -> list[str]:
        """Of ``gcloud``, to create it."""
        nodes = [f"--node-count={self.slices}", f"--node-prefix={self.name}"]
        options = {
            "--network": self.network,
            "--subnetwork": self.subnetwork,
            "--service-account": self.service_account,
            "--valid-until-duration": self.valid_until,
        }
        switches = {"--spot": self.spot, "--reserved": self.reserved, "--internal-ips": self.internal_ips}
        return [
            *_RESOURCES,
            "create",
            self.name,
            *(nodes if self.slices > 1 else [f"--node-id={self.name}"]),
            f"--accelerator-type={self.slice.accelerator_type}",
            f"--runtime-version={self.runtime or self.slice.runtime}",
            *(f"{name}={value}" for name, value in options.items() if value is not None),
            *(name for name, on in switches.items() if on),
            *self.extra,
            "--async",  # being in the queue is enough: how far it is, is asked for
        ]


@dataclasses.dataclass(frozen=True)
class Found:
    """A queued resource as the cloud describes it.

    Attributes:
      state: WAITING_FOR_RESOURCES, PROVISIONING, ACTIVE, SUSPENDED, FAILED, ...
      detail: why it failed, where the cloud says so.
      accelerator_type: of every node.
      nodes: their names.
    """

    state: str
    detail: str
    accelerator_type: str
    nodes: tuple[str, ...]

    @classmethod
    def of(cls, name: str, description: dict[str, Any]) -> "Found":
        """Reads ``describe --format=json``."""
        state = description.get("state") or {}
        error = (state.get("failedData") or {}).get("error") or {}
        specs = (description.get("tpu") or {}).get("nodeSpec") or []
        nodes: list[str] = []
        for spec in specs:
            several = spec.get("multisliceParams") or spec.get("multiNodeParams")
            if several and not spec.get("nodeId"):
                prefix = several.get("nodeIdPrefix", name)
                nodes += [f"{prefix}-{i}" for i in range(int(several["nodeCount"]))]
            else:
                nodes.append(spec.get("nodeId", name))
        node = specs[0].get("node", {}) if specs else {}
        return cls(
            state.get("state", "UNKNOWN"), error.get("message", ""), node.get("acceleratorType", ""), tuple(nodes)
        )

    @property
    def generation(self) -> str:
        """Of its chips."""
        return describe_accelerator(self.accelerator_type)[0]

    @property
    def hosts(self) -> int:
        """Workers of all nodes together."""
        return describe_accelerator(self.accelerator_type)[1] * len(self.nodes)


@dataclasses.dataclass(frozen=True)
class Reply:
    """What a worker says of the run.

    Attributes:
      host: its name.
      state: ABSENT (not set up), IDLE (never launched), RUNNING, EXITED, LOST (ended without leaving a status).
      code: exit status, of EXITED.
    """

    host: str
    state: str
    code: int | None = None


class Resource:
    """A queued resource by its name."""

    def __init__(self, gcloud: Gcloud, name: str, ssh_arguments: tuple[str, ...] = ()):
        self.gcloud = gcloud
        self.name = name
        self._ssh_arguments = ssh_arguments

    def describe(self) -> Found | None:
        """How it stands; None where there is none.

        Raises:
          GcloudError: it can't be known.
        """
        try:
            text = self.gcloud.run(*_RESOURCES, "describe", self.name, "--format=json")
        except GcloudError as error:
            if error.kind is Kind.NOT_FOUND:
                return None
            raise
        return Found.of(self.name, json.loads(text))

    def create(self, request: Request) -> None:
        """Asks for it; one that is there already is left as it is.

        Raises:
          GcloudError: the request was refused.
        """
        try:
            self.gcloud.run(*request.arguments())
        except GcloudError as error:
            if error.kind is not Kind.EXISTS:
                raise

    def delete(self) -> None:
        """Gives it back with its nodes; nothing happens where there is none.

        Raises:
          GcloudError: it may still be there, and cost money.
        """
        try:
            self.gcloud.run(*_RESOURCES, "delete", self.name, "--force", "--async")
        except GcloudError as error:
            if error.kind is not Kind.NOT_FOUND:
                raise

    def node_states(self, nodes: tuple[str, ...]) -> dict[str, str]:
        """State of every node (READY, PREEMPTED, ...); MISSING for one that is not there.

        Raises:
          GcloudError: they can't be known.
        """
        listed = json.loads(self.gcloud.run("compute", "tpus", "tpu-vm", "list", "--format=json") or "[]")
        states = {node["name"].rpartition("/")[2]: node.get("state", "UNKNOWN") for node in listed}
        return {node: states.get(node, "MISSING") for node in nodes}

    def ssh(self, script: str, timeout: float, echo: bool = False) -> str:
        """What a script prints on all workers, each executing it at once.

        Raises:
          GcloudError: it failed on a worker, or one can't be reached; ``output`` has what the others printed.
        """
        return self.gcloud.run(
            *_RESOURCES,
            "ssh",
            self.name,
            *_EVERYWHERE,
            *self._ssh_arguments,
            f"--command={script}",
            timeout=timeout,
            echo=echo,
        )

    def copy(self, file: str, target: str, timeout: float) -> None:
        """Copies a file to a path relative to the home directory of every worker.

        Raises:
          GcloudError: it did not arrive everywhere.
        """
        self.gcloud.run(
            *_RESOURCES, "scp", file, f"{self.name}:{target}", *_EVERYWHERE, *self._ssh_arguments, timeout=timeout
        )

    def replies(self, run: str, timeout: float) -> list[Reply]:
        """What every worker that answers says of a run."""
        script = (
            f"if [ -f iha_jax/tpu/worker.sh ]; then bash iha_jax/tpu/worker.sh status {shlex.quote(run)}; "
            'else echo "iha-worker $(hostname) ABSENT"; fi'
        )
        try:
            text = self.ssh(script, timeout)
        except GcloudError as error:
            if error.kind is Kind.PERMANENT and "gcloud is not" in str(error):
                raise
            text = error.output
        return [Reply(host, state, None if code == "" else int(code)) for host, state, code in _REPLY.findall(text)]
