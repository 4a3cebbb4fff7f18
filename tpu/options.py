"""Command-line options that the launchers share."""

import argparse
import re
import sys
from collections.abc import Callable, Sequence

from tpu.command import option_value
from tpu.slices import Slice

_BUCKET = re.compile(r"gs://[a-z0-9][-_.a-z0-9]{1,220}[a-z0-9]")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def split_arguments(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """What stands before and after the first "--"."""
    arguments = list(arguments)
    if "--" not in arguments:
        return arguments, []
    cut = arguments.index("--")
    return arguments[:cut], arguments[cut + 1 :]


def add_slice(parser: argparse.ArgumentParser) -> None:
    """Which chips, and how many."""
    parser.add_argument("--tpu", required=True, type=checked(Slice.parse), help="generation and topology, v5e:4x4")
    parser.add_argument("--slices", type=int, default=1, help="slices of it (default 1)")
    parser.add_argument("--spot", action="store_true", help="cheap, and taken away at any time")


def add_job(parser: argparse.ArgumentParser) -> None:
    """What the workers see and are told."""
    parser.add_argument(
        "--mount",
        action="append",
        default=[],
        type=checked(parse_mount),
        metavar="gs://BUCKET=/FOLDER",
        help="mount a bucket on every worker; may be repeated",
    )
    parser.add_argument("--cache", help="folder of compiled programs (default: jax-cache in train.py's --directory)")
    parser.add_argument(
        "--env",
        action="append",
        default=[],
        type=checked(parse_variable),
        metavar="NAME=VALUE",
        help="environment variable of the run; may be repeated",
    )


def environment(arguments: argparse.Namespace, training_arguments: Sequence[str]) -> dict[str, str]:
    """Variables of the run: the compilation cache, then what was given.

    Raises:
      ValueError: the cache is not a folder that all workers see.
    """
    cache = arguments.cache
    if cache is None:
        cache = f"{(option_value(training_arguments, '--directory') or '').rstrip('/')}/jax-cache"
    if not cache.startswith("/"):
        raise ValueError(f"--cache must be an absolute path (in a mounted bucket, for one), got {cache!r}")
    return {"JAX_COMPILATION_CACHE_DIR": cache, **dict(arguments.env)}


def parse_mount(text: str) -> tuple[str, str]:
    """Bucket and folder of "gs://bucket=/mnt/bucket"."""
    bucket, _, folder = text.partition("=")
    if not _BUCKET.fullmatch(bucket) or not folder.startswith("/") or folder.rstrip("/") == "":
        raise ValueError(f"a mount is written gs://BUCKET=/FOLDER, gs://my-runs=/mnt/runs for one; got {text!r}")
    return bucket, folder.rstrip("/")


def parse_variable(text: str) -> tuple[str, str]:
    """Name and value of "NAME=VALUE"."""
    name, separator, value = text.partition("=")
    if not separator or not _VARIABLE.fullmatch(name):
        raise ValueError(f"a variable is written NAME=VALUE, got {text!r}")
    return name, value


def fail(error: object) -> int:
    """Says what is wrong; the exit status for it."""
    print(f"error: {error}", file=sys.stderr)
    return 1


def checked(parse: Callable[[str], object]) -> Callable[[str], object]:
    """A type for ``argparse`` that keeps the message of a ValueError."""

    def convert(text: str) -> object:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return convert
