"""TPU virtual machines by queued resources: ``python -m tpu.queued create|run|status|logs|stop|delete|babysit NAME``.

What follows "--" are ``train.py``'s arguments. Stopping this program (Ctrl-C) stops neither the machines nor the run.
"""

import argparse
import sys
from collections.abc import Callable, Sequence

from tpu import options
from tpu.babysit import Babysitter, GiveUpError, Job, Policy, launch
from tpu.command import check_run, training_command
from tpu.gcloud import Gcloud, GcloudError
from tpu.package import Package
from tpu.resource import Found, Request, Resource

_PYTHON = "~/.iha_jax/venv/bin/python"  # made by the workers' setup.sh; "~" is theirs


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; the exit status is 0 done, 1 failed, 2 wrong arguments, 130 interrupted."""
    own, training = options.split_arguments(sys.argv[1:] if arguments is None else arguments)
    parser = _parser()
    parsed = parser.parse_args(own)
    if training and parsed.command not in ("run", "babysit"):
        parser.error(f"{parsed.command} takes no arguments of train.py, got {training}")
    sys.stdout.reconfigure(line_buffering=True)  # pyright: ignore[reportAttributeAccessIssue] (a log file is followed)
    ssh = ("--tunnel-through-iap",) if parsed.iap else ()
    resource = Resource(Gcloud(parsed.zone, parsed.project), parsed.name, ssh)
    try:
        return parsed.call(parsed, resource, training)
    except (ValueError, GcloudError, GiveUpError) as error:
        return options.fail(error)
    except KeyboardInterrupt:
        print(f"\ninterrupted; {parsed.name} and what runs on it are as they were", file=sys.stderr)
        return 130


def _create(parsed: argparse.Namespace, resource: Resource, _: list[str]) -> int:
    request = _request(parsed)
    found = resource.describe()
    if found is None:
        resource.create(request)
        print(f"{resource.name}: asked for {request.slices} x {request.slice.accelerator_type}")
        return 0
    if (found.accelerator_type, len(found.nodes)) != (request.slice.accelerator_type, request.slices):
        raise ValueError(
            f"{resource.name} is there, but is {len(found.nodes)} x {found.accelerator_type}, not {request.slices} x "
            f"{request.slice.accelerator_type}: delete it first, or choose another name"
        )
    if found.state in ("FAILED", "SUSPENDED", "SUSPENDING", "DELETING"):
        raise ValueError(f"{resource.name} is there, but {found.state} {found.detail}".rstrip() + ": delete it first")
    print(f"{resource.name}: {found.state}, already asked for")
    return 0


def _run(parsed: argparse.Namespace, resource: Resource, training: list[str]) -> int:
    job = _job(parsed, training)
    package = Package()
    found = _active(resource)
    replies = resource.replies(job.run, Policy().ssh_timeout)
    if len(replies) < found.hosts:
        raise ValueError(f"{len(replies)} of {found.hosts} workers answer: try again, or look at them with 'status'")
    states = {reply.state for reply in replies}
    if states == {"RUNNING"}:
        print(f"run {job.run} is running already on {found.hosts} workers")
        return 0
    if "RUNNING" in states:
        raise ValueError(f"run {job.run} runs on a part of the workers only: 'stop' it first")
    launch(resource, found, job, package)
    print(f"run {job.run} is running on {found.hosts} workers; 'logs' shows what it prints")
    return 0


def _status(parsed: argparse.Namespace, resource: Resource, _: list[str]) -> int:
    found = resource.describe()
    if found is None:
        print(f"{resource.name}: there is none")
        return 1
    print(f"{resource.name}: {found.state} {found.detail}".rstrip())
    if found.state == "ACTIVE":
        for node, state in resource.node_states(found.nodes).items():
            print(f"  node {node}: {state}")
        replies = resource.replies(_run_id(parsed), Policy().ssh_timeout)
        for reply in sorted(replies, key=lambda reply: reply.host):
            print(f"  {reply.host}: {reply.state}{'' if reply.code is None else f' {reply.code}'}")
        if len(replies) < found.hosts:
            print(f"  {found.hosts - len(replies)} of {found.hosts} workers do not answer")
    return 0


def _logs(parsed: argparse.Namespace, resource: Resource, _: list[str]) -> int:
    _active(resource)
    script = f'bash iha_jax/tpu/worker.sh log {_run_id(parsed)} {parsed.lines} | sed "s/^/$(hostname): /"'
    print(resource.ssh(script, Policy().ssh_timeout), end="")
    return 0


def _stop(parsed: argparse.Namespace, resource: Resource, _: list[str]) -> int:
    _active(resource)
    script = f"bash iha_jax/tpu/worker.sh stop {_run_id(parsed)} {parsed.grace}"
    print(resource.ssh(script, parsed.grace + 60), end="")
    return 0


def _delete(_: argparse.Namespace, resource: Resource, __: list[str]) -> int:
    resource.delete()
    print(f"{resource.name}: deleted")
    return 0


def _babysit(parsed: argparse.Namespace, resource: Resource, training: list[str]) -> int:
    request, job = _request(parsed), _job(parsed, training)
    policy = Policy(
        recreations=parsed.max_recreations,
        restarts=parsed.max_restarts,
        stable=parsed.stable,
        poll=parsed.poll,
        backoff=parsed.backoff,
    )
    try:
        Babysitter(resource, request, job, Package(), policy).follow()
    except GiveUpError as error:
        print(f"error: {error}", file=sys.stderr)
        status = 1
    else:
        status = 0
    if parsed.keep:
        print(f"{resource.name} is kept, and costs money until it is deleted")
    else:
        resource.delete()
        print(f"{resource.name}: deleted")
    return status


def _request(parsed: argparse.Namespace) -> Request:
    return Request(
        name=parsed.name,
        slice=parsed.tpu,
        slices=parsed.slices,
        spot=parsed.spot,
        reserved=parsed.reserved,
        runtime=parsed.runtime_version,
        network=parsed.network,
        subnetwork=parsed.subnetwork,
        service_account=parsed.service_account,
        internal_ips=parsed.internal_ips,
        valid_until=parsed.valid_until_duration,
        extra=tuple(parsed.create_argument),
    )


def _job(parsed: argparse.Namespace, training: list[str]) -> Job:
    run = _run_id(parsed)
    command = training_command(_PYTHON, run, training)
    return Job(run, tuple(command), options.environment(parsed, training), dict(parsed.mount))


def _run_id(parsed: argparse.Namespace) -> str:
    return check_run(parsed.run or parsed.name)


def _active(resource: Resource) -> Found:
    found = resource.describe()
    if found is None or found.state != "ACTIVE":
        state = "not there" if found is None else found.state
        raise ValueError(f"{resource.name} must be ACTIVE, but is {state}")
    return found


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tpu.queued", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)

    def command(name: str, call: Callable[..., int], help: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=help, description=help)
        sub.set_defaults(call=call)
        sub.add_argument("name", type=options.checked(check_run), help="of the queued resource")
        sub.add_argument("--zone", required=True)
        sub.add_argument("--project", help="default: gcloud's")
        sub.add_argument("--iap", action="store_true", help="ssh through Identity-Aware Proxy (no public addresses)")
        sub.add_argument(
            "--run",
            type=options.checked(check_run),
            help="the run id, train.py's --name (default: the resource's name)",
        )
        return sub

    def add_request(sub: argparse.ArgumentParser) -> None:
        options.add_slice(sub)
        sub.add_argument("--reserved", action="store_true", help="from a reservation")
        sub.add_argument("--runtime-version", help="image of the machines (default: the generation's)")
        sub.add_argument("--network")
        sub.add_argument("--subnetwork")
        sub.add_argument("--service-account", help="default: Compute Engine's")
        sub.add_argument("--internal-ips", action="store_true", help="no public addresses (then also --iap)")
        sub.add_argument("--valid-until-duration", help="stop waiting for capacity after this long, 6h for one")
        sub.add_argument(
            "--create-argument",
            action="append",
            default=[],
            metavar="ARGUMENT",
            help="further, --create-argument=--tags=x, of 'gcloud ... queued-resources create'; may be repeated",
        )

    add_request(command("create", _create, "ask for the resource; done if it was asked for before"))
    options.add_job(command("run", _run, "install and launch on all workers; done if it is running"))
    command("status", _status, "the resource, its nodes and the run on every worker")
    logs = command("logs", _logs, "the end of every worker's output")
    logs.add_argument("--lines", type=int, default=20)
    stop = command("stop", _stop, "stop the run on all workers: train.py saves and exits")
    stop.add_argument("--grace", type=int, default=Policy().grace, help="seconds until it is killed")
    command("delete", _delete, "give the resource back; done if there is none")
    babysit = command("babysit", _babysit, "create, run, and begin again until the run has ended well; then delete")
    add_request(babysit)
    options.add_job(babysit)
    policy = Policy()
    babysit.add_argument("--keep", action="store_true", help="do not delete the resource in the end")
    babysit.add_argument("--max-recreations", type=int, default=policy.recreations, help="losses in a row")
    babysit.add_argument("--max-restarts", type=int, default=policy.restarts, help="failures of the run in a row")
    babysit.add_argument("--stable", type=float, default=policy.stable, help="seconds after which a row is over")
    babysit.add_argument("--poll", type=float, default=policy.poll, help="seconds between looks")
    babysit.add_argument("--backoff", type=float, default=policy.backoff, help="seconds before the first repetition")
    return parser


if __name__ == "__main__":
    sys.exit(main())
