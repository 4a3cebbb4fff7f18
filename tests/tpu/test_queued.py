import pathlib
import subprocess
import sys
import time

import pytest

from tests.tpu.conftest import executable
from tpu import queued
from tpu.babysit import Babysitter, GiveUpError, Job, Policy
from tpu.gcloud import Gcloud, GcloudError, Kind
from tpu.package import Package
from tpu.resource import Found, Reply, Request, Resource
from tpu.slices import Slice

REPOSITORY = pathlib.Path(__file__).resolve().parents[2]
ZONE = ("--zone", "us-west4-a", "--project", "p")
TPU = ("--tpu", "v5p:2x2x2")  # two hosts
TRAINING = ("--", "configs/x.py", "--directory", "/mnt/b/runs")
QUICK = ("--poll", "0.01", "--backoff", "1e-6")
EXPECTED = ["configs/x.py", "--directory", "/mnt/b/runs", "--name", "r", "--resume", "auto"]


def babysit(*options, tpu=TPU):
    return queued.main(["babysit", "r", *ZONE, *tpu, *QUICK, *options, *TRAINING])


def wait_for(condition, seconds=10):
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit, "did not happen in time"
        time.sleep(0.02)


def test_create_asks_for_one_slice_once(cloud, capsys):
    cloud.play(["WAITING_FOR_RESOURCES"])
    for _ in range(2):
        assert queued.main(["create", "r", *ZONE, *TPU, "--spot", "--valid-until-duration", "6h"]) == 0
    (call,) = cloud.calls("create")
    assert call == [
        *("compute", "tpus", "queued-resources", "create", "r", "--node-id=r", "--accelerator-type=v5p-16"),
        *("--runtime-version=v2-alpha-tpuv5", "--valid-until-duration=6h", "--spot", "--async"),
        *("--zone=us-west4-a", "--project=p", "--quiet"),
    ]
    assert "WAITING_FOR_RESOURCES, already asked for" in capsys.readouterr().out


def test_create_asks_for_several_slices(cloud):
    cloud.play(["ACTIVE"])
    options = [
        "--reserved",
        "--network",
        "n",
        "--service-account",
        "a@b",
        "--internal-ips",
        "--create-argument=--tags=x",
    ]
    arguments = ["create", "r", "--zone", "z", "--tpu", "v5p:4x4x8", "--slices", "2", *options]
    assert queued.main(arguments) == 0
    (call,) = cloud.calls("create")
    assert "--node-count=2" in call
    assert "--node-prefix=r" in call
    assert "--accelerator-type=v5p-256" in call
    assert {"--reserved", "--network=n", "--service-account=a@b", "--internal-ips", "--tags=x"} <= set(call)
    assert not any(a.startswith("--node-id") for a in call)


def test_create_refuses_another_one_of_the_name(cloud, capsys):
    cloud.play(["ACTIVE"])
    assert queued.main(["create", "r", *ZONE, *TPU]) == 0
    assert queued.main(["create", "r", *ZONE, "--tpu", "v5e:8x8"]) == 1
    error = capsys.readouterr().err
    assert "1 x v5p-16" in error
    assert "1 x v5litepod-64" in error
    assert babysit(tpu=("--tpu", "v5e:8x8")) == 1
    assert len(cloud.calls("create")) == 1


def test_create_refuses_one_that_failed(cloud, capsys):
    cloud.play(["FAILED"])
    assert queued.main(["create", "r", *ZONE, *TPU]) == 0
    assert queued.main(["create", "r", *ZONE, *TPU]) == 1
    assert "FAILED no capacity until the deadline: delete it first" in capsys.readouterr().err


def test_a_run_goes_from_the_queue_to_its_end(cloud, capsys):
    cloud.play(["WAITING_FOR_RESOURCES", "PROVISIONING", "ACTIVE/CREATING", "ACTIVE"], workers=2, deleting=1)
    cloud.train("exit 0")
    assert babysit("--mount", "gs://bkt=/mnt/b") == 0
    assert cloud.trained() == {(0, f"r-w{i}"): EXPECTED for i in range(2)}
    assert len(cloud.calls("create")) == len(cloud.calls("delete")) == 1
    assert "--force" in cloud.calls("delete")[0]
    assert (cloud.folder / "homes/0/r-w1/mounts").read_text() == "gs://bkt /mnt/b\n"
    out = capsys.readouterr().out
    assert "r: WAITING_FOR_RESOURCES" in out
    assert "r is CREATING" in out
    assert "has ended well on 2 workers" in out


def test_every_node_of_a_multislice_run_works(cloud):
    cloud.play(["ACTIVE"], workers=2)
    cloud.train("exit 0")
    assert babysit("--slices", "2", "--keep") == 0
    assert sorted(cloud.trained()) == [(0, f"r-{node}-w{i}") for node in range(2) for i in range(2)]
    assert not cloud.calls("delete")
    ssh = cloud.calls("ssh")[0]
    assert "--node=all" in ssh
    assert "--worker=all" in ssh


def test_a_lost_run_begins_anew_under_the_same_id(cloud, capsys):
    lives = [
        ["ACTIVE", "ACTIVE", "ACTIVE/PREEMPTED"],
        ["SUSPENDING", "SUSPENDED"],
        ["FAILED"],
        ["PROVISIONING", "ACTIVE"],
    ]
    cloud.play(*lives, workers=2, deleting=1)
    cloud.train('[ "$LIFE" = 3 ] || sleep 60')
    assert babysit("--spot") == 0
    assert cloud.trained() == {(life, f"r-w{i}"): EXPECTED for life in (0, 3) for i in range(2)}
    calls = cloud.calls("create")
    assert len(calls) == 4
    assert all(call == calls[0] for call in calls)
    assert len(cloud.calls("delete")) == 4
    out = capsys.readouterr().out
    assert "r is lost (r is PREEMPTED); recreations 1 of 20" in out
    assert "r is lost (SUSPENDED); recreations 2 of 20" in out
    assert "r is lost (FAILED: no capacity until the deadline); recreations 3 of 20" in out


def test_quota_errors_are_retried_and_capped(cloud, capsys):
    quota = "RESOURCE_EXHAUSTED: Quota limit 'TPUV5sPreemptibleLitepod' has been exceeded."
    cloud.play(["ACTIVE"], workers=2, create_errors=[quota] * 2)
    cloud.train("exit 0")
    assert babysit("--max-recreations", "2") == 0
    assert len(cloud.calls("create")) == 3
    cloud.play(["ACTIVE"], create_errors=[quota] * 100)
    assert babysit("--max-recreations", "2") == 1
    assert len(cloud.calls("create")) == 3 + 3
    assert "TPUV5sPreemptibleLitepod" in capsys.readouterr().err


def test_preemptions_in_a_row_are_capped(cloud, capsys):
    cloud.play(["ACTIVE/PREEMPTED"])
    assert babysit("--max-recreations", "2") == 1
    assert len(cloud.calls("create")) == 3
    assert "given up after 2 recreations in a row" in capsys.readouterr().err
    assert len(cloud.calls("delete")) == 3  # and none is left


def test_what_cannot_pass_is_not_retried(cloud, capsys):
    cloud.play(["ACTIVE"], create_errors=["PERMISSION_DENIED: TPU API is disabled (quota project)"] * 9)
    assert babysit() == 1
    assert len(cloud.calls("create")) == 1
    assert "PERMISSION_DENIED" in capsys.readouterr().err


def test_disturbances_pass(cloud):
    cloud.play(["error: UNAVAILABLE: The service is currently unavailable.", "error: HTTP 503", "ACTIVE"], workers=2)
    cloud.train("exit 0")
    assert queued.main(["create", "r", *ZONE, *TPU]) == 0
    assert babysit() == 0


def test_a_failing_program_is_restarted_where_it_is(cloud, capsys):
    cloud.play(["ACTIVE"], workers=2)
    cloud.train('echo "step 7"; [ $(tr "\\0" "\\n" <"$FAKE_CLOUD/trained-0-$FAKE_HOST" | grep -c x.py) -ge 2 ]')
    assert babysit() == 0
    assert {len(arguments) // len(EXPECTED) for arguments in cloud.trained().values()} == {2}
    assert len(cloud.calls("create")) == 1
    out = capsys.readouterr().out
    assert "step 7" in out
    assert "restarts 1 of 5" in out


def test_restarts_are_capped(cloud, capsys):
    cloud.play(["ACTIVE"], workers=2)
    cloud.train("exit 1")
    assert babysit("--max-restarts", "1") == 1
    assert {len(arguments) // len(EXPECTED) for arguments in cloud.trained().values()} == {2}
    captured = capsys.readouterr()
    assert "given up after 1 restarts in a row" in captured.err
    assert "r: deleted" in captured.out


def test_a_wrong_command_is_not_restarted(cloud, capsys):
    cloud.play(["ACTIVE"], workers=2)
    cloud.train("exit 2")
    assert babysit("--keep") == 1
    assert all(arguments == EXPECTED for arguments in cloud.trained().values())
    captured = capsys.readouterr()
    assert "the command is wrong" in captured.err
    assert "r is kept" in captured.out


def test_one_failure_stops_all_and_all_begin_again(cloud):
    cloud.play(["ACTIVE"], workers=2)
    # The first time, one fails and the others wait for it; told to stop, they say so.
    cloud.train(
        'if [ -f "$HOME/again" ]; then exit 0; fi; touch "$HOME/again"\n'
        'if [ "$FAKE_HOST" = r-w1 ]; then exit 134; fi\n'
        'trap "touch $HOME/stopped; exit 143" TERM; for i in $(seq 600); do sleep 0.1; done'
    )
    assert babysit() == 0
    stopped = sorted(path.parent.name for path in cloud.folder.glob("homes/0/*/stopped"))
    assert stopped == ["r-w0"]
    assert {len(arguments) // len(EXPECTED) for arguments in cloud.trained().values()} == {2}


def test_silent_workers_are_given_up(cloud):
    cloud.play(["ACTIVE/READY/silent"], ["ACTIVE"], workers=2)
    cloud.train("exit 0")
    policy = Policy(errors=3, poll=0, backoff=0)
    request = Request("r", Slice.parse("v5p:2x2x2"))
    job = Job("r", ("~/.iha_jax/venv/bin/python", "train.py"))
    resource = Resource(Gcloud("z"), "r")
    Babysitter(resource, request, job, Package(), policy, log=lambda _: None, sleep=cloud.let_it_end).follow()
    assert len(cloud.calls("create")) == 2
    assert len(cloud.calls("ssh")) == 3 + 2 + 2  # three without an answer; look, set up, launch, look


class Scripted(Resource):
    """A resource that is lost at every look, or after having run for a while."""

    def __init__(self, clock, lasting):
        super().__init__(Gcloud("z"), "r")
        self.clock, self.lasting, self.created = clock, lasting, 0

    def describe(self):
        return Found("ACTIVE", "", "v5p-16", ("r",)) if self.created and not self.gone else None

    def create(self, request):
        self.created += 1
        self.gone, self.looks = False, 0
        if self.created > 8:
            raise GcloudError(Kind.PERMANENT, "enough")

    def delete(self):
        self.gone = True

    def node_states(self, nodes):
        self.looks += 1
        self.clock[0] += 1000
        return {"r": "READY" if self.looks <= self.lasting else "PREEMPTED"}

    def replies(self, run, timeout):
        return [Reply(f"w{i}", "RUNNING") for i in range(2)]


@pytest.mark.parametrize(
    ("lasting", "slept"),
    [(0, [10, 20, 40, 60]), (1, [10, 20, 40, 60]), (3, [10] * 8)],  # 2,000 s of running begin a new row
)
def test_waits_grow_in_a_row_and_begin_anew_after_a_stable_while(cloud, lasting, slept):
    clock, sleeps = [0.0], []
    policy = Policy(recreations=4, stable=2000, poll=1, backoff=10, longest_backoff=60)
    job = Job("r", ("python",))
    request = Request("r", Slice.parse("v5p:2x2x2"))
    resource = Scripted(clock, lasting)
    babysitter = Babysitter(resource, request, job, Package(), policy, lambda _: None, sleeps.append, lambda: clock[0])
    with pytest.raises((GiveUpError, GcloudError)):
        babysitter.follow()
    assert [seconds for seconds in sleeps if seconds != 1] == slept


def test_interrupting_leaves_everything_and_beginning_again_finds_it(cloud, capsys, monkeypatch):
    cloud.play(["ACTIVE"], workers=2)
    cloud.train('while [ ! -f "$FAKE_CLOUD/finish" ]; do sleep 0.05; done')
    looks = []

    def interrupt(seconds):
        looks.append(seconds)
        if len(looks) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(queued.Babysitter.__init__, "__defaults__", (Policy(), print, interrupt, time.monotonic))
    assert babysit() == 130
    assert "as they were" in capsys.readouterr().err
    assert not cloud.calls("delete")
    (cloud.folder / "finish").touch()
    monkeypatch.setattr(queued.Babysitter.__init__, "__defaults__", (Policy(), print, time.sleep, time.monotonic))
    assert babysit() == 0
    assert cloud.trained() == {(0, f"r-w{i}"): EXPECTED for i in range(2)}  # launched once
    assert len(cloud.calls("create")) == 1


def test_odd_arguments_arrive_unchanged(cloud):
    odd = ["--sample.prompt", 'it\'s $HOME; `id` "q" \\ * é\n&& exit', "--x", "", "-y=a b"]
    cloud.play(["ACTIVE"], workers=2)
    cloud.train('printf "%s" "$ODD" >"$HOME/odd"; printf "%s" "$JAX_COMPILATION_CACHE_DIR" >"$HOME/cache"')
    assert queued.main(["babysit", "r", *ZONE, *TPU, *QUICK, "--env", "ODD=$A 'b' c=d", *TRAINING, *odd]) == 0
    expected = [*EXPECTED[:3], *odd, *EXPECTED[3:]]
    assert cloud.trained() == {(0, f"r-w{i}"): expected for i in range(2)}
    home = cloud.folder / "homes/0/r-w1"
    assert (home / "odd").read_text() == "$A 'b' c=d"
    assert (home / "cache").read_text() == "/mnt/b/runs/jax-cache"


def test_run_status_logs_stop_delete(cloud, capsys):
    cloud.play(["ACTIVE"], workers=2)
    cloud.train('trap "exit 143" TERM; echo started; for i in $(seq 600); do sleep 0.1; done')
    assert queued.main(["run", "r", *ZONE, *TRAINING]) == 1
    assert "must be ACTIVE, but is not there" in capsys.readouterr().err
    assert queued.main(["create", "r", *ZONE, *TPU]) == 0
    for _ in range(2):
        assert queued.main(["run", "r", *ZONE, *TRAINING]) == 0
    assert "is running already on 2 workers" in capsys.readouterr().out
    wait_for(lambda: len(cloud.trained()) == 2)
    assert cloud.trained() == {(0, f"r-w{i}"): EXPECTED for i in range(2)}
    assert queued.main(["status", "r", *ZONE]) == 0
    out = capsys.readouterr().out
    assert "r: ACTIVE" in out
    assert "node r: READY" in out
    assert "r-w1: RUNNING" in out
    wait_for(lambda: all("started" in p.read_text() for p in cloud.folder.glob("homes/0/*/.iha_jax/runs/r/log")))
    assert queued.main(["logs", "r", *ZONE]) == 0
    assert "r-w0: started" in capsys.readouterr().out
    assert queued.main(["stop", "r", *ZONE, "--grace", "20"]) == 0
    assert capsys.readouterr().out.count("EXITED 143") == 2
    for _ in range(2):
        assert queued.main(["delete", "r", *ZONE]) == 0
    assert queued.main(["status", "r", *ZONE]) == 1


def test_a_gcloud_that_hangs_is_ended_with_all_it_started(programs, tmp_path):
    executable(programs / "gcloud", f"#!/bin/bash\necho early\nsleep 61 & echo $! >{tmp_path}/child\nsleep 61\n")
    with pytest.raises(GcloudError, match="did not answer in 1 s") as error:
        Gcloud("z").run("compute", timeout=1)
    assert (error.value.kind, error.value.output) == (Kind.TRANSIENT, "early\n")
    child = pathlib.Path(f"/proc/{(tmp_path / 'child').read_text().strip()}/stat")
    wait_for(lambda: not child.exists() or " Z " in child.read_text())


def test_without_gcloud_it_says_what_to_install(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert queued.main(["status", "r", *ZONE]) == 1
    assert "install the Google Cloud CLI" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("training", "message"),
    [
        ([], "begin with the config"),
        (["--directory", "/d"], "begin with the config"),
        (["c.py"], "--directory must be an absolute path"),
        (["c.py", "--directory", "runs"], "got 'runs'"),
        (["c.py", "--directory=gs://b/runs"], "got 'gs://b/runs'"),
        (["c.py", "--directory=/d", "--name", "other"], "--name is fixed"),
        (["c.py", "--directory=/d", "--resume=never"], "--resume is fixed"),
    ],
)
def test_runs_that_could_not_resume_are_refused(capsys, training, message):
    assert queued.main(["run", "r", *ZONE, "--", *training]) == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["create", "Run_1", *ZONE, *TPU], "got 'Run_1'"),
        (["create", "r", *ZONE, "--tpu", "v5e:3x3"], "2x2, 2x4, 4x4"),
        (["create", "r", *ZONE, "--tpu", "v3:4x4"], "one of v5e, v5p, v6e"),
        (["create", "r", *ZONE, "--tpu", "v5p:4x8x4"], "A <= B <= C"),
        (["run", "r", *ZONE, "--mount", "bucket=/x"], "gs://BUCKET=/FOLDER"),
        (["run", "r", *ZONE, "--env", "1=x"], "NAME=VALUE"),
        (["status", "r", *ZONE, "--", "configs/x.py"], "takes no arguments of train.py"),
    ],
)
def test_wrong_arguments_are_explained(capsys, arguments, message):
    with pytest.raises(SystemExit) as exit:
        queued.main(arguments)
    assert exit.value.code == 2
    assert message in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("module", ["tpu.queued", "tpu.gke"])
def test_the_launchers_need_nothing_but_python(module):
    code = f"import sys; sys.path.insert(0, {str(REPOSITORY)!r}); import {module}"
    done = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True)
    assert done.stderr == ""
