"""A run as a Kubernetes JobSet: one Job for every slice, one pod for every host of it.

When a pod fails, the JobSet begins anew as a whole, and ``train.py`` resumes from its last checkpoint.
"""

import dataclasses
import json
import re
from collections.abc import Sequence
from typing import Any

from tpu.command import check_run
from tpu.gcloud import quoted
from tpu.slices import Slice

_JOB = "slice"  # of the JobSet's jobs: run-slice-0, run-slice-1, ...
_CONTAINER = "train"
_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
_LONGEST_NAME = 63
# train.py's exit status for a wrong flag or config: beginning anew would not help.
_WRONG_COMMAND = 2


@dataclasses.dataclass(frozen=True)
class Workload:
    """What the JobSet runs, and where.

    Attributes:
      run: the run id and the JobSet's name.
      slice: of every Job.
      slices: Jobs; more than one talk over the data-centre network.
      image: of the container: this repository at ``folder``, installed.
      command: executed in ``folder``.
      folder: of this repository in the image.
      environment: variables of the container.
      mounts: what is mounted where: "gs://bucket" or "pvc://claim" to folder.
      spot: on cheap nodes that are taken away at any time.
      max_restarts: how often the JobSet may begin anew.
      grace: seconds to save in when a pod is to go.
      namespace: None leaves it to kubectl.
      queue: Kueue's LocalQueue that admits it; None, no Kueue.
      service_account: Kubernetes' one, which may use the buckets; None, the namespace's default.
      host_network: the nodes' network instead of the pods': faster between slices.
    """

    run: str
    slice: Slice
    image: str
    command: tuple[str, ...]
    slices: int = 1
    folder: str = "/iha_jax"
    environment: dict[str, str] = dataclasses.field(default_factory=dict)
    mounts: dict[str, str] = dataclasses.field(default_factory=dict)
    spot: bool = False
    max_restarts: int = 20
    grace: int = 120
    namespace: str | None = None
    queue: str | None = None
    service_account: str | None = None
    host_network: bool = False

    def __post_init__(self):
        """Checks what Kubernetes, JobSet and GKE would refuse, or leave pending for ever."""
        check_run(self.run)
        if self.slices < 1 or self.max_restarts < 0 or self.grace < 1:
            raise ValueError(
                "slices and grace must be at least 1 and max_restarts at least 0, "
                f"got {self.slices}, {self.grace} and {self.max_restarts}"
            )
        if self.slices > 1 and self.slice.nodes == 1:
            raise ValueError(
                f"several slices need slices of several hosts, got {self.slices} of "
                f"{self.slice.generation}:{self.slice.topology}, which is one host"
            )
        longest = f"{self.run}-{_JOB}-{self.slices - 1}-{self.slice.nodes - 1}-abcde"
        if len(longest) > _LONGEST_NAME:
            raise ValueError(f"pods' names may have {_LONGEST_NAME} characters, {longest!r} has {len(longest)}")
        for what, value in (("namespace", self.namespace), ("queue", self.queue)):
            if value is not None and (not _LABEL.fullmatch(value) or len(value) > _LONGEST_NAME):
                raise ValueError(f"{what} must be at most 63 of a-z, 0-9 and '-', got {value!r}")
        for source in self.mounts:
            if not source.startswith(("gs://", "pvc://")):
                raise ValueError(f"only gs://BUCKET and pvc://CLAIM can be mounted, got {source!r}")
        folders = list(self.mounts.values())
        if len(set(folders)) != len(folders) or "/dev/shm" in folders:
            raise ValueError(f"every mount needs a folder of its own, other than /dev/shm, got {folders}")

    def node_pool(self, name: str, cluster: str, location: str) -> list[str]:
        """The command that makes a node pool for one of the slices."""
        command = ["gcloud", "container", "node-pools", "create", name]
        command += [f"--cluster={cluster}", f"--location={location}", f"--machine-type={self.slice.machine}"]
        command += [f"--num-nodes={self.slice.nodes}"]
        if self.slice.nodes > 1:
            command += [f"--tpu-topology={self.slice.topology}"]
        return [*command, "--spot"] if self.spot else command

    def manifest(self) -> dict[str, Any]:
        """The JobSet."""
        metadata: dict[str, Any] = {"name": self.run}
        if self.namespace is not None:
            metadata["namespace"] = self.namespace
        if self.queue is not None:
            metadata["labels"] = {"kueue.x-k8s.io/queue-name": self.queue}
        # A slice's pods go to one node pool, and no other slice's with them.
        metadata["annotations"] = {"alpha.jobset.sigs.k8s.io/exclusive-topology": "cloud.google.com/gke-nodepool"}
        wrong_command = {
            "action": "FailJob",
            "onExitCodes": {"containerName": _CONTAINER, "operator": "In", "values": [_WRONG_COMMAND]},
        }
        job = {
            "completionMode": "Indexed",
            "completions": self.slice.nodes,
            "parallelism": self.slice.nodes,
            "backoffLimit": 0,  # a pod alone can't begin anew: the others wait for it in vain
            "podFailurePolicy": {"rules": [wrong_command]},
            "template": self._pod_template(),
        }
        rule = {"name": "wrongCommand", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}
        return {
            "apiVersion": "jobset.x-k8s.io/v1alpha2",
            "kind": "JobSet",
            "metadata": metadata,
            "spec": {
                "failurePolicy": {"maxRestarts": self.max_restarts, "rules": [rule]},
                "replicatedJobs": [{"name": _JOB, "replicas": self.slices, "template": {"spec": job}}],
            },
        }

    def gcluster(self, cluster: str, location: str) -> list[str]:
        """The command that submits the same through Cluster Toolkit (1.103 or newer)."""
        command = ["gcluster", "job", "submit", f"--name={self.run}", f"--cluster={cluster}", f"--location={location}"]
        command += [f"--image={self.image}", f"--compute-type={self.slice.accelerator_type}"]
        command += [f"--topology={self.slice.topology}", f"--num-slices={self.slices}"]
        command += [f"--restarts={self.max_restarts}", f"--grace-period={self.grace}s"]
        if self.queue is not None:
            command.append(f"--queue={self.queue}")
        if self.service_account is not None:
            command.append(f"--service-account={self.service_account}")
        command += [f"--env={name}={value}" for name, value in self.environment.items()]
        command += [f"--mount={source};{folder};rw" for source, folder in self.mounts.items()]
        return [*command, f"--command=cd {quoted([self.folder])} && {quoted(self._entry())}"]

    def _entry(self) -> list[str]:
        script = f'. tpu/env.sh {self.slice.generation} && exec "$@"'
        return ["bash", "-c", script, _CONTAINER, *self.command]

    def _pod_template(self) -> dict[str, Any]:
        count = self.slice.chips_per_node
        mounts = [{"name": "shm", "mountPath": "/dev/shm"}]
        volumes: list[dict[str, Any]] = [{"name": "shm", "emptyDir": {"medium": "Memory"}}]
        for index, (source, folder) in enumerate(self.mounts.items()):
            mounts.append({"name": f"mount-{index}", "mountPath": folder})
            volumes.append({"name": f"mount-{index}", **_volume(source)})
        container = {
            "name": _CONTAINER,
            "image": self.image,
            "workingDir": self.folder,
            "command": self._entry(),
            "env": [{"name": name, "value": value} for name, value in self.environment.items()],
            "ports": [{"containerPort": 8471}, {"containerPort": 8080}],
            "resources": {"requests": {"google.com/tpu": count}, "limits": {"google.com/tpu": count}},
            "volumeMounts": mounts,
        }
        selector = {
            "cloud.google.com/gke-tpu-accelerator": self.slice.label,
            "cloud.google.com/gke-tpu-topology": self.slice.topology,
        }
        spec: dict[str, Any] = {
            "restartPolicy": "Never",  # as podFailurePolicy demands; the JobSet does what is to be done
            "terminationGracePeriodSeconds": self.grace,
            "nodeSelector": selector,
            "containers": [container],
            "volumes": volumes,
        }
        if self.spot:
            selector["cloud.google.com/gke-spot"] = "true"
            toleration = {"key": "cloud.google.com/gke-spot", "operator": "Equal", "value": "true"}
            spec["tolerations"] = [{**toleration, "effect": "NoSchedule"}]
        if self.service_account is not None:
            spec["serviceAccountName"] = self.service_account
        if self.host_network:
            spec |= {"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet"}
        template: dict[str, Any] = {"spec": spec}
        if any(source.startswith("gs://") for source in self.mounts):
            template["metadata"] = {"annotations": {"gke-gcsfuse/volumes": "true"}}
        return template


def to_yaml(value: Any, indent: int = 0) -> str:
    """YAML of dicts, lists, strings, whole numbers and booleans; strings are quoted as JSON quotes them."""
    pad = "  " * indent
    lines = []
    if isinstance(value, dict):
        for key, item in value.items():
            lines.append(f"{pad}{_key(key)}:{_item(item, indent + 1)}")
    else:
        for item in value:
            text = _item(item, indent + 1)
            # An item that is a mapping or a list begins on the dash's line.
            lines.append(f"{pad}-{text if not text.startswith(chr(10)) else ' ' + text.lstrip()}")
    return "\n".join(lines)


def _item(value: Any, indent: int) -> str:
    if isinstance(value, dict | list) and value:
        return "\n" + to_yaml(value, indent)
    return " " + json.dumps(value)


def _key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z][-A-Za-z0-9./]*", key) else json.dumps(key)


def _volume(source: str) -> dict[str, Any]:
    scheme, _, name = source.partition("://")
    if scheme == "pvc":
        return {"persistentVolumeClaim": {"claimName": name}}
    # See tpu/mount.sh for the options.
    attributes = {"bucketName": name, "mountOptions": "implicit-dirs,rename-dir-limit=1000000"}
    return {"csi": {"driver": "gcsfuse.csi.storage.gke.io", "volumeAttributes": attributes}}


def shell_lines(command: Sequence[str]) -> str:
    """A command for reading: one argument a line, as a shell takes it."""
    return " \\\n  ".join(quoted([part]) for part in command)
