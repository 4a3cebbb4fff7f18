"""A run on Google Kubernetes Engine: ``python -m tpu.gke NAME --tpu v6e:4x4 --image IMAGE -- CONFIG ...``.

Prints the JobSet for ``kubectl apply -f``; ``--submit`` applies it. What follows "--" are ``train.py``'s arguments.
"""

import argparse
import subprocess
import sys
from collections.abc import Sequence

from tpu import options
from tpu.command import check_run, training_command
from tpu.jobset import Workload, shell_lines, to_yaml


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints or submits; the exit status is 0 done, 1 failed, 2 wrong arguments."""
    own, training = options.split_arguments(sys.argv[1:] if arguments is None else arguments)
    parsed = _parser().parse_args(own)
    try:
        workload = _workload(parsed, training)
        if parsed.print in ("gcluster", "node-pools") and not (parsed.cluster and parsed.location):
            raise ValueError(f"--print {parsed.print} needs --cluster and --location")
        if parsed.print == "gcluster":
            print(shell_lines(workload.gcluster(parsed.cluster, parsed.location)))
        elif parsed.print == "node-pools":
            for index in range(workload.slices):
                name = f"{workload.run}-{index}"
                print(shell_lines(workload.node_pool(name, parsed.cluster, parsed.location)))
        elif parsed.submit:
            return _apply(to_yaml(workload.manifest()) + "\n")
        else:
            print(to_yaml(workload.manifest()))
    except ValueError as error:
        return options.fail(error)
    return 0


def _apply(manifest: str) -> int:
    try:
        done = subprocess.run(["kubectl", "apply", "-f", "-"], input=manifest, text=True, check=False)
    except FileNotFoundError:
        return options.fail("kubectl is not on the PATH: 'gcloud components install kubectl', or print the manifest")
    if done.returncode:
        return options.fail(
            "kubectl refused the JobSet (above). If one of this name is there: it can't be changed, so "
            "'kubectl delete jobset NAME' first; the run resumes. If there are no JobSets: install their controller"
        )
    return 0


def _workload(parsed: argparse.Namespace, training: list[str]) -> Workload:
    return Workload(
        run=parsed.name,
        slice=parsed.tpu,
        slices=parsed.slices,
        image=parsed.image,
        command=tuple(training_command(parsed.python, parsed.name, training)),
        folder=parsed.folder,
        environment=options.environment(parsed, training),
        mounts=dict([*parsed.mount, *parsed.claim]),
        spot=parsed.spot,
        max_restarts=parsed.max_restarts,
        grace=parsed.grace,
        namespace=parsed.namespace,
        queue=parsed.queue,
        service_account=parsed.service_account,
        host_network=parsed.host_network,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tpu.gke", description=__doc__)
    parser.add_argument("name", type=options.checked(check_run), help="of the JobSet, and train.py's --name")
    options.add_slice(parser)
    options.add_job(parser)
    parser.add_argument("--image", required=True, help="made by tpu/Dockerfile")
    parser.add_argument("--folder", default="/iha_jax", help="of this repository in the image")
    parser.add_argument("--python", default="python", help="in the image")
    parser.add_argument(
        "--claim",
        action="append",
        default=[],
        type=options.checked(_claim),
        metavar="NAME=/FOLDER",
        help="mount a PersistentVolumeClaim (Filestore, for one); may be repeated",
    )
    parser.add_argument("--max-restarts", type=int, default=20)
    parser.add_argument("--grace", type=int, default=120, help="seconds to save in when a pod is to go")
    parser.add_argument("--namespace")
    parser.add_argument("--queue", help="Kueue's LocalQueue")
    parser.add_argument("--service-account", help="Kubernetes' one that may use the buckets")
    parser.add_argument("--host-network", action="store_true", help="faster between slices; no Workload Identity")
    parser.add_argument("--print", choices=("jobset", "gcluster", "node-pools"), default="jobset")
    parser.add_argument("--cluster", help="for --print gcluster and node-pools")
    parser.add_argument("--location", help="likewise")
    parser.add_argument("--submit", action="store_true", help="kubectl apply it")
    return parser


def _claim(text: str) -> tuple[str, str]:
    name, _, folder = text.partition("=")
    if not name or not folder.startswith("/"):
        raise ValueError(f"a claim is written NAME=/FOLDER, got {text!r}")
    return f"pvc://{name}", folder.rstrip("/")


if __name__ == "__main__":
    sys.exit(main())
