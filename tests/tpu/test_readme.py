"""The commands of tpu/README.md, played by a shell and read by the launchers."""

import pathlib
import re
import subprocess

import pytest
import yaml

from tests.tpu.conftest import executable
from tpu import gke, options, queued
from tpu.command import training_command

README = pathlib.Path(__file__).resolve().parents[2] / "tpu" / "README.md"


@pytest.fixture
def commands(tmp_path, programs):
    """Arguments of every call of a launcher in the README."""
    record = f'#!/bin/bash\nprintf "%s\\0" "$@" >>{tmp_path}/calls\nprintf "\\n\\0" >>{tmp_path}/calls\n'
    for name in ("python", "gcloud", "kubectl", "docker", "gcluster"):
        executable(programs / name, record)
    blocks = re.findall(r"```bash\n(.*?)```", README.read_text(), re.DOTALL)
    script = "\n".join(block for block in blocks if "tpu.queued" in block or "tpu.gke" in block)
    script = script.replace("BUCKET", "my-bucket")
    done = subprocess.run(["bash", "-euc", script], cwd=tmp_path, capture_output=True, text=True)
    assert done.stderr == ""
    calls = [call.split("\0")[:-1] for call in (tmp_path / "calls").read_text().split("\n\0")]
    return [call[2:] for call in calls if call[:2] in (["-m", "tpu.queued"], ["-m", "tpu.gke"])]


def test_the_launchers_understand_what_is_written(commands, capsys):
    verbs = []
    for arguments in commands:
        own, training = options.split_arguments(arguments)
        if training:
            training_command("python", "my-run", training)
        if "--image" not in own:
            verbs.append(queued._parser().parse_args(own).command)
            continue
        assert gke.main(arguments) == 0
        out = capsys.readouterr().out
        if "--print" not in own:
            assert yaml.safe_load(out)["spec"]["replicatedJobs"][0]["replicas"] == 2
    assert verbs == ["babysit", "create", "status", "run", "logs", "stop", "delete"]
    assert len(commands) == len(verbs) + 3
