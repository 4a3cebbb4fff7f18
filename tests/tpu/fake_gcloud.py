"""Plays gcloud from a scenario: records every call, keeps machines as folders, runs what is sent to them.

``$FAKE_CLOUD/scenario.json``:
  lives: for every creation in a row, what successive looks find. A look is "STATE", "STATE/NODE_STATE",
    "STATE/NODE_STATE/silent" when no worker answers, or "error: TEXT"; the last one stays.
  create_errors: texts with which the first creations fail.
  deleting: looks that still find the resource after its deletion.
  workers: of a node.
"""

import contextlib
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys

ROOT = pathlib.Path(os.environ["FAKE_CLOUD"])


def fail(text, status=1):
    print(f"ERROR: (gcloud.compute.tpus) {text}", file=sys.stderr)
    sys.exit(status)


def option(arguments, name):
    found = [a.partition("=")[2] for a in arguments if a.startswith(name + "=")]
    return found[-1] if found else None


def homes(state):
    folder = ROOT / "homes" / str(state["life"])
    for node in state["nodes"]:
        for worker in range(state["workers"]):
            home = folder / f"{node}-w{worker}"
            home.mkdir(parents=True, exist_ok=True)
            yield home


def power_off(state):
    for home in homes(state):
        for file in home.glob(".iha_jax/runs/*/pid"):
            with contextlib.suppress(ProcessLookupError, ValueError):
                os.killpg(int(file.read_text()), signal.SIGKILL)


def look(scenario, state):
    """What there is to be seen now, without moving on."""
    looks = scenario["lives"][min(state["life"], len(scenario["lives"]) - 1)]
    return looks[min(state["looks"], len(looks) - 1)]


def create(arguments, scenario, state):
    state["creates"] += 1
    if state["creates"] <= len(scenario.get("create_errors", [])):
        return scenario["create_errors"][state["creates"] - 1]
    if state["exists"]:
        return "ALREADY_EXISTS: Resource already exists."
    count = option(arguments, "--node-count")
    prefix = option(arguments, "--node-prefix")
    state["nodes"] = [f"{prefix}-{i}" for i in range(int(count))] if count else [option(arguments, "--node-id")]
    state["accelerator"] = option(arguments, "--accelerator-type")
    state.update(exists=True, life=state["life"] + 1, looks=-1, deleting=0, workers=scenario.get("workers", 1))
    return None


def describe(scenario, state):
    if state["deleting"]:
        state["deleting"] -= 1
        state["exists"] = bool(state["deleting"])
        seen = "DELETING"
    elif not state["exists"]:
        fail("NOT_FOUND: Resource 'queuedResources/x' was not found")
    else:
        state["looks"] += 1
        seen = look(scenario, state)
    if seen.startswith("error: "):
        return seen
    name = seen.split("/")[0]
    detail = {"failedData": {"error": {"message": "no capacity until the deadline"}}} if name == "FAILED" else {}
    nodes = [{"node": {"acceleratorType": state["accelerator"]}, "nodeId": node} for node in state["nodes"]]
    print(json.dumps({"name": "x", "state": {"state": name, **detail}, "tpu": {"nodeSpec": nodes}}))
    return None


def on_workers(arguments, scenario, state, command):
    seen = look(scenario, state)
    if seen.endswith("/silent"):
        fail("ssh: connect to host 10.0.0.2 port 22: Connection timed out", 255)
    status = 0
    for home in homes(state):
        if command == "ssh":
            environment = {**os.environ, "HOME": str(home), "FAKE_HOST": home.name}
            script = option(arguments, "--command")
            done = subprocess.run(["bash", "-c", script], cwd=home, env=environment, stdin=subprocess.DEVNULL)
            status = status or done.returncode
        else:
            source, target = [a for a in arguments if not a.startswith("-")][4:6]
            shutil.copy(source, home / target.partition(":")[2])
    sys.exit(status)


def main(arguments):
    with open(ROOT / "calls.jsonl", "a") as calls:
        calls.write(json.dumps(arguments) + "\n")
    scenario = json.loads((ROOT / "scenario.json").read_text())
    file = ROOT / "state.json"
    state = {"exists": False, "life": -1, "looks": -1, "creates": 0, "nodes": [], "deleting": 0, "workers": 1}
    if file.exists():
        state = json.loads(file.read_text())
    error = None
    group, command = arguments[2], arguments[3]
    if group == "tpu-vm":
        seen = ([*look(scenario, state).split("/"), "READY"])[1]
        print(json.dumps([{"name": f"projects/p/locations/z/nodes/{n}", "state": seen} for n in state["nodes"]]))
    elif command in ("ssh", "scp"):
        on_workers(arguments, scenario, state, command)
    elif command == "create":
        error = create(arguments, scenario, state)
    elif command == "describe":
        error = describe(scenario, state)
    elif command == "delete":
        if not state["exists"]:
            fail("NOT_FOUND: Resource 'queuedResources/x' was not found")
        power_off(state)
        state["deleting"] = scenario.get("deleting", 0)
        state["exists"] = bool(state["deleting"])
    file.write_text(json.dumps(state))
    if error:
        fail(error.removeprefix("error: "))


main(sys.argv[1:])
