"""The grid: finished runs are kept, interrupted ones done again, results are whole, and mistakes are named."""

import dataclasses
import json
import os
import pathlib
import subprocess
import sys

import pytest

from iha_jax.experiments import Comparison, Entry, Metric
from iha_jax.experiments.compare import main
from iha_jax.experiments.runner import cells, run_grid
from iha_jax.experiments.snapshot import write_atomically
from iha_jax.training.lock import RunLock
from tests.experiments.grids import Killed, Known, comparison


def grid(output, progress=lambda line: None, what=None, seeds=2):
    return run_grid(comparison() if what is None else what, seeds, output, "the command", progress)


def lines(output):
    return [json.loads(line) for line in (output / "results.jsonl").read_text().splitlines()]


def test_a_grid_killed_again_and_again_ends_with_the_same_results(tmp_path):
    assert grid(tmp_path / "whole")
    worked = 0

    def killed_at(limit):
        nonlocal worked
        left = limit

        def progress(line):
            nonlocal worked, left
            worked += line == "working"
            left -= 1
            if left < 0:
                raise Killed

        return progress

    kills = 0
    while True:
        try:
            # 4 lines: one about the grid, then cell, work and result of one run; the next is interrupted.
            assert grid(tmp_path / "killed", killed_at(5))
            break
        except Killed:
            kills += 1
    assert kills > 3
    results = [
        [{k: v for k, v in record.items() if k not in ("started", "finished")} for record in lines(tmp_path / name)]
        for name in ("whole", "killed")
    ]
    assert results[0] == results[1]
    assert [r["seed"] for r in results[0]] == [0] * 4 + [1] * 4
    assert [r["metrics"]["accuracy"] for r in results[0]] == pytest.approx([0.7, 0.8, 0.5, 0.6, 0.7, 0.85, 0.5, 0.65])
    assert results[0][0]["command"] == "the command"
    assert results[0][0]["versions"]["jax"]
    assert results[0][0]["config"]["base"] == 0.7
    assert not list(tmp_path.rglob("*.part"))


def test_what_is_done_is_not_done_again(tmp_path):
    assert grid(tmp_path, seeds=1)
    told = []
    assert grid(tmp_path, told.append, seeds=2)
    assert told[0].endswith(f"8 runs, 4 done, in {tmp_path}")
    assert told.count("working") == 4


def test_results_from_before_a_field_was_added_are_kept(tmp_path):
    grid(tmp_path)
    for file in tmp_path.glob("cells/*/result.json"):
        record = json.loads(file.read_text())
        if record["config"]["mixes"] is False:  # the default
            del record["config"]["mixes"]
            file.write_text(json.dumps(record))
    told = []
    grid(tmp_path, told.append)
    assert "working" not in told


def test_results_of_another_configuration_are_not_taken_for_these(tmp_path):
    grid(tmp_path)
    first, *rest = comparison().entries
    changed = dataclasses.replace(first, experiment=Known(base=0.9))
    with pytest.raises(ValueError, match=r"another configuration \(base: 0.7 there, 0.9 here\): choose another --out"):
        grid(tmp_path, what=comparison(entries=(changed, *rest)))


def test_a_cell_in_other_hands_is_left_alone(tmp_path):
    taken = cells(comparison(), 1, tmp_path)[1]
    told = []
    with RunLock(taken.directory):
        assert not grid(tmp_path, told.append, seeds=1)
    assert any("another process has it" in line for line in told)
    assert len(lines(tmp_path)) == 3
    assert grid(tmp_path, seeds=1)
    assert len(lines(tmp_path)) == 4


def test_errors_of_an_experiment_are_not_swallowed(tmp_path):
    @dataclasses.dataclass(frozen=True)
    class Failing:
        def run(self, seed, directory, progress):
            raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        grid(tmp_path, what=comparison(entries=(Entry("plain", "easy", Failing()),)))


def test_a_file_is_the_old_one_or_the_new_one(tmp_path):
    file = tmp_path / "file"
    write_atomically(file, lambda stream: stream.write(b"old"))

    def half(stream):
        stream.write(b"ne")
        raise Killed

    with pytest.raises(Killed):
        write_atomically(file, half)
    assert file.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"entries": ()}, "at least one entry"),
        ({"metrics": ()}, "at least one entry and one metric"),
        ({"baseline": "plane"}, r"baseline must be one of \['plain', 'mixed & more'\], got 'plane'"),
        ({"entries": (Entry("plain", "easy", Known(1)),) * 2}, "two entries 'plain' in the setting 'easy'"),
    ],
)
def test_wrong_comparisons(changes, message):
    with pytest.raises(ValueError, match=message):
        comparison(**changes)


# ---------------------------------------------------------------------------------------------------- command line

CONFIG = """
import dataclasses
from tests.experiments.grids import comparison
CONFIG = comparison()
CONFIG = dataclasses.replace(CONFIG, reduced=dataclasses.replace(CONFIG, entries=CONFIG.entries[:2], note="Less."))
"""


@pytest.fixture
def config(tmp_path):
    file = tmp_path / "config.py"
    file.write_text(CONFIG)
    return str(file)


def test_the_command_runs_reduced_on_a_cpu_and_reports(config, tmp_path, capsys):
    output = tmp_path / "out"
    assert main([config, "--seeds", "2", "--output", str(output)]) == 0
    assert len(lines(output)) == 4
    page = (output / "report.html").read_text()
    assert "Less." in page
    assert f"compare {config} --seeds 2" in page
    assert "report.html" in capsys.readouterr().out


def test_options(config, tmp_path):
    output = tmp_path / "out"
    assert main([config, "--seeds=1", "--scale=full", "--only", "hard.*mixed", f"--output={output}"]) == 0
    assert [(r["setting"], r["variant"]) for r in lines(output)] == [("hard <1>", "mixed & more")]
    assert main([config, "--seeds=1", "--scale=full", "--report-only", f"--output={output}"]) == 0
    assert "1 of 4 runs are finished" in (output / "report.html").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere.py"], "no config at 'nowhere.py'"),
        (["{config}", "--only", "nothing like it"], "leaves nothing of 'easy · plain'"),
        (["{other}"], "must define CONFIG, a Comparison, got dict"),
        (["{whole}", "--scale", "reduced"], "has no reduced form"),
    ],
)
def test_wrong_commands(config, tmp_path, arguments, message):
    (tmp_path / "other.py").write_text("CONFIG = {}\n")
    (tmp_path / "whole.py").write_text("from tests.experiments.grids import comparison\nCONFIG = comparison()\n")
    paths = {name: str(tmp_path / f"{name}.py") for name in ("config", "other", "whole")}
    with pytest.raises(SystemExit, match=message):
        main([a.format(**paths) for a in arguments])


def test_wrong_numbers_of_seeds(config, capsys):
    with pytest.raises(SystemExit):
        main([config, "--seeds", "0"])
    assert "expected a whole number of at least 1, got '0'" in capsys.readouterr().err


def test_metrics_and_comparisons_are_plain_values():
    assert Metric("a", "A") == Metric("a", "A")
    assert isinstance(comparison(), Comparison)
    assert comparison().settings == ("easy", "hard <1>")


@pytest.mark.slow
def test_processes_killed_outright_leave_what_the_next_can_finish(tmp_path):
    """SIGKILL, at moments that fall anywhere in a run or in the writing of its files."""
    config = tmp_path / "config.py"
    config.write_text("from tests.experiments.grids import comparison\nCONFIG = comparison()\n")
    root = pathlib.Path(__file__).parents[2]
    command = [sys.executable, "-m", "iha_jax.experiments.compare", str(config), "--seeds=6", "--output"]

    def start(name):
        environment = os.environ | {"PYTHONPATH": str(root), "PYTHONUNBUFFERED": "1"}
        return subprocess.Popen(
            [*command, str(tmp_path / name)], cwd=root, env=environment, stdout=subprocess.PIPE, text=True
        )

    with start("whole") as process:
        assert process.wait(timeout=300) == 0
    for lines_seen in (2, 7, 9, 15):
        with start("killed") as process:
            for _ in range(lines_seen):
                process.stdout.readline()
            process.kill()
    with start("killed") as process:
        assert " 0 done" not in process.stdout.readline()
        assert process.wait(timeout=300) == 0
    numbers = [
        [
            {k: record[k] for k in ("setting", "variant", "seed", "metrics", "curves")}
            for record in lines(tmp_path / name)
        ]
        for name in ("whole", "killed")
    ]
    assert numbers[0] == numbers[1]
    assert len(numbers[0]) == 24
