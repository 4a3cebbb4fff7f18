"""The command line: a config file, then overrides of its values by name."""

import importlib.util
import pathlib
import sys
from collections.abc import Sequence
from typing import TypeVar

from iha_jax.extras import needed
from iha_jax.training.config import TrainConfig
from iha_jax.training.serialization import from_json, to_json

T = TypeVar("T")

_USAGE = """usage: python train.py CONFIG [--NAME VALUE ...] [--print-config]

CONFIG is a Python file with a CONFIG (configs/tiny.py), a run's config.json, or a run's directory.

  python train.py configs/tiny.py                             train; stop it, run it again: it resumes
  python train.py configs/tiny.py --optimizer.peak-lr 3e-4    override a value
  python train.py configs/tiny.py --help                      list every value of this config
  python train.py configs/tiny.py --print-config              print the config as JSON and exit
"""


def parse(arguments: Sequence[str]) -> TrainConfig:
    """The configuration a command line asks for.

    ``--help`` and ``--print-config`` print and exit with status 0; a wrong name or value prints what was
    meant and exits with status 2.

    Args:
      arguments: without the program's name.
    """
    arguments = list(arguments)
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_USAGE, end="")
        sys.exit(0 if arguments else 2)
    if arguments[0].startswith("-"):
        sys.exit(f"error: the config file comes first, got {arguments[0]!r}\n\n{_USAGE}")
    print_config = "--print-config" in arguments
    rest = [a for a in arguments[1:] if a != "--print-config"]
    try:
        config = override(load(arguments[0]), rest, arguments[0])
    except (ValueError, OSError, ImportError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    if print_config:
        print(to_json(config), end="")
        sys.exit(0)
    return config


def load(path: str) -> TrainConfig:
    """The configuration in a Python file, a JSON file or a run's directory.

    Raises:
      FileNotFoundError: nothing is there.
      ValueError: the Python file has no ``CONFIG`` of the type ``TrainConfig``.
    """
    file = pathlib.Path(path).expanduser()
    if file.is_dir():
        file = file / "config.json"
    if not file.is_file():
        raise FileNotFoundError(f"no config at {path!r}: expected a .py or .json file, or a run's directory")
    if file.suffix == ".json":
        return from_json(TrainConfig, file.read_text())
    return config_in(file, TrainConfig)


def config_in(file: pathlib.Path, kind: type[T]) -> T:
    """What a Python file calls ``CONFIG``.

    Args:
      file: a Python file that exists.
      kind: what its ``CONFIG`` must be.

    Raises:
      ValueError: it isn't a Python file, or has no such ``CONFIG``.
    """
    spec = importlib.util.spec_from_file_location(f"iha_jax_config_{file.stem}", file)
    if spec is None or spec.loader is None:
        raise ValueError(f"{str(file)!r} isn't a Python file")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    config = getattr(module, "CONFIG", None)
    if not isinstance(config, kind):
        article = "an" if kind.__name__[0] in "AEIOU" else "a"
        raise ValueError(f"{str(file)!r} must define CONFIG, {article} {kind.__name__}, got {type(config).__name__}")
    return config


def override(config: TrainConfig, arguments: Sequence[str], name: str) -> TrainConfig:
    """The configuration with ``--name value`` overrides applied and checked again."""
    with needed("tyro", "the command line"):
        import tyro

    return tyro.cli(
        TrainConfig,
        default=config,
        args=list(arguments),
        prog=f"train.py {name}",
        config=(tyro.conf.AvoidSubcommands,),
        description=f"Train as {name} says, with any value below overridden. --print-config prints it as JSON.",
    )
