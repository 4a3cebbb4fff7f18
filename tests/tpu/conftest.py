import contextlib
import fcntl
import json
import os
import pathlib
import shutil
import signal
import sys

import pytest

from tpu import package

ROOT = pathlib.Path(__file__).resolve().parents[2]


def executable(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


@pytest.fixture
def programs(tmp_path, monkeypatch):
    """A folder at the head of the PATH."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    return folder


class Cloud:
    """The scripted cloud of fake_gcloud.py, and a checkout whose setup takes no time.

    What stands for ``train.py`` is the script given to ``train``: it sees ``$FAKE_HOST``, ``$LIFE`` (0 for the first
    creation) and the arguments of ``train.py``.
    """

    def __init__(self, folder, programs):
        self.folder = folder
        fake = pathlib.Path(__file__).with_name("fake_gcloud.py")
        executable(programs / "gcloud", f'#!/bin/sh\nexec {sys.executable} -I -S {fake} "$@"\n')
        executable(programs / "hostname", '#!/bin/sh\necho "$FAKE_HOST"\n')
        self.checkout = folder / "checkout"
        (self.checkout / "tpu").mkdir(parents=True)
        (self.checkout / "train.py").touch()
        for name in ("worker.sh", "env.sh"):
            shutil.copy(ROOT / "tpu" / name, self.checkout / "tpu" / name)
        executable(self.checkout / "tpu" / "mount.sh", '#!/bin/sh\necho "$@" >>"$HOME/mounts"\n')
        interpreter = 'export LIFE=$(basename "$(dirname "$HOME")")\nshift\nexec bash "$FAKE_CLOUD/train" "$@"\n'
        setup = (
            'echo "$@" >>"$HOME/setups"\nmkdir -p "$2/bin"\ncat >"$2/bin/python" <<\'END\'\n#!/bin/bash\n'
            f'{interpreter}END\nchmod +x "$2/bin/python"\n'
        )
        executable(self.checkout / "tpu" / "setup.sh", f"#!/bin/sh\n{setup}")

    def play(self, *lives, **scenario):
        (self.folder / "scenario.json").write_text(json.dumps({"lives": lives, **scenario}))

    def train(self, script):
        record = 'printf "%s\\0" "$@" >>"$FAKE_CLOUD/trained-$LIFE-$FAKE_HOST"\n'
        (self.folder / "train").write_text(record + script)

    def trained(self):
        """Arguments of every start of train.py, by life and worker."""
        found = {}
        for file in sorted(self.folder.glob("trained-*")):
            _, life, host = file.name.split("-", 2)
            found[int(life), host] = file.read_text().split("\0")[:-1]
        return found

    def calls(self, verb=None):
        """What gcloud was called with, or only the calls of a verb ("create")."""
        file = self.folder / "calls.jsonl"
        calls = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
        return [call for call in calls if verb is None or call[3] == verb]

    def let_it_end(self, _seconds=0):
        """Returns when every program that was started is through: for looks to be as many on a busy machine."""
        for lock in self.folder.glob("homes/*/*/.iha_jax/runs/*/lock"):
            with lock.open() as file:
                fcntl.flock(file, fcntl.LOCK_EX)  # a running program holds it; closed, it is free again

    def end(self):
        """Kills what still runs."""
        for file in self.folder.glob("homes/*/*/.iha_jax/runs/*/pid"):
            with contextlib.suppress(ProcessLookupError, ValueError):
                os.killpg(int(file.read_text()), signal.SIGKILL)


@pytest.fixture
def cloud(tmp_path, programs, monkeypatch):
    folder = tmp_path / "cloud"
    folder.mkdir()
    monkeypatch.setenv("FAKE_CLOUD", str(folder))
    cloud = Cloud(folder, programs)
    monkeypatch.setattr(package, "ROOT", cloud.checkout)
    yield cloud
    cloud.end()
