"""Packs text into fixed-length rows once, for fast and exact pre-training.

    python -m iha_jax.data.prepare --source.kind files --source.path 'corpus/*.jsonl' --output rows \
        --sequence-length 8192 --tokenizer tokenizer.json

The source is divided into shards by size alone, and each shard is packed by itself; so neither the number of
workers nor an interruption changes a single row. Run the same command again after an interruption: finished
shards are kept. ``manifest.json`` appears when all is done.
"""

import collections
import concurrent.futures
import dataclasses
import errno
import hashlib
import itertools
import json
import multiprocessing
import os
import pathlib
import signal
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np

from iha_jax.data.config import SourceConfig
from iha_jax.data.documents import Documents, is_held_out
from iha_jax.data.rows import MANIFEST, SPLITS, Manifest, RowFormat
from iha_jax.data.shards import ShardJob, finished, make_shard
from iha_jax.data.sources import open_documents
from iha_jax.data.tokenizers import load_tokenizer, train_tokenizer
from iha_jax.extras import needed

with needed("rich", "showing progress"):
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

_PLAN = "plan.json"


@dataclasses.dataclass(frozen=True)
class PrepareConfig:
    """What to pack, and how.

    Attributes:
      source: the text: kind "stdlib", "files" or "hub".
      output: directory of the rows.
      sequence_length: T, tokens of a row.
      tokenizer: "bytes", or the path of a tokenizers JSON or SentencePiece model, or a Hugging Face name.
      train_tokenizer: train a byte-level BPE of this many tokens on the training split first, keep it as
        tokenizer.json in the output, and use it.
      tokenizer_megabytes: text to train it on at most.
      held_out_fraction: share of the documents, chosen by a hash of their text, kept apart as "held_out".
      shard_megabytes: text of a shard.
      workers: processes; 0, one for each processor.
    """

    output: str
    source: SourceConfig = SourceConfig()  # noqa: RUF009 (frozen)
    sequence_length: int = 2048
    tokenizer: str = "bytes"
    train_tokenizer: int | None = None
    tokenizer_megabytes: int = 256
    held_out_fraction: float = 0.001
    shard_megabytes: float = 64.0
    workers: int = 0

    def __post_init__(self):
        """Checks ranges."""
        if self.source.kind == "packed":
            raise ValueError("source.kind must be 'stdlib', 'files' or 'hub', got 'packed': those are rows already")
        if self.sequence_length < 2:
            raise ValueError(f"sequence_length must be at least 2, got {self.sequence_length}")
        if not 0 <= self.held_out_fraction < 1:
            raise ValueError(f"held_out_fraction must be in [0, 1), got {self.held_out_fraction}")
        if self.shard_megabytes <= 0 or self.tokenizer_megabytes < 1 or self.workers < 0:
            raise ValueError(
                "shard_megabytes must be positive, tokenizer_megabytes at least 1 and workers at least 0, got "
                f"{self.shard_megabytes}, {self.tokenizer_megabytes} and {self.workers}"
            )
        if self.train_tokenizer is not None and self.tokenizer != "bytes":
            raise ValueError(f"train_tokenizer makes a tokenizer, but tokenizer={self.tokenizer!r} was given too")


def prepare(config: PrepareConfig, console: Console | None = None) -> Manifest:
    """Makes what is missing of the rows, and the manifest.

    Raises:
      FileNotFoundError: nothing is at the source's path.
      ValueError: the directory was begun with other settings, or the tokenizer is unknown.
      OSError: the disk is full or the directory can't be written.
    """
    console = console or Console(stderr=True)
    documents = open_documents(config.source)
    directory = pathlib.Path(config.output).expanduser()
    (directory / "receipts").mkdir(parents=True, exist_ok=True)
    tokenizer_name = config.tokenizer
    if config.train_tokenizer is not None:
        tokenizer_name = str(directory / "tokenizer.json")
        if not os.path.isfile(tokenizer_name):
            console.print(f"training a tokenizer of {config.train_tokenizer} tokens")
            train_tokenizer(_sample(config, documents), config.train_tokenizer, tokenizer_name)
    tokenizer = load_tokenizer(tokenizer_name)
    stretches = divide(documents.sizes(), int(config.shard_megabytes * 2**20))
    _check_plan(directory, config, tokenizer.fingerprint, documents, stretches)
    rows = RowFormat.of(config.sequence_length, tokenizer.vocab_size)
    jobs = [
        ShardJob(
            str(directory),
            i,
            len(stretches),
            documents.select(*stretch),
            rows,
            tokenizer_name,
            config.held_out_fraction,
        )
        for i, stretch in enumerate(stretches)
    ]
    receipts = {job.index: receipt for job in jobs if (receipt := finished(job)) is not None}
    _make(jobs, receipts, config, console)
    manifest = _manifest(config, rows, tokenizer.fingerprint, [receipts[i] for i in range(len(jobs))])
    temporary = directory / (MANIFEST + ".tmp")
    temporary.write_text(manifest.to_json())
    os.replace(temporary, directory / MANIFEST)
    return manifest


def divide(sizes: np.ndarray, limit: int) -> list[tuple[int, int]]:
    """Stretches [start, stop) of documents, each of about ``limit`` bytes: a function of the sizes alone."""
    ends = np.cumsum(sizes)
    total = int(ends[-1]) if len(ends) else 0
    count = max(1, -(-total // limit))
    cuts = [int(np.searchsorted(ends, total * i // count)) for i in range(1, count)]
    bounds = sorted({0, *cuts, len(sizes)})
    return list(itertools.pairwise(bounds))


def _make(jobs: list[ShardJob], receipts: dict[int, Any], config: PrepareConfig, console: Console) -> None:
    missing = [job for job in jobs if job.index not in receipts]
    if not missing:
        return
    workers = min(config.workers or os.cpu_count() or 1, len(missing))
    columns = (TextColumn("packing"), BarColumn(), MofNCompleteColumn(), TextColumn("shards"), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=len(jobs), completed=len(receipts))
        if workers == 1:
            for job in missing:
                receipts[job.index] = make_shard(job)
                progress.advance(task)
            return
        # Fresh interpreters: threads of the tokenizers and of jax don't survive a fork.
        context = multiprocessing.get_context("spawn")
        pool = concurrent.futures.ProcessPoolExecutor(workers, context, initializer=_ignore_interrupts)
        try:
            futures = {pool.submit(make_shard, job): job.index for job in missing}
            for future in concurrent.futures.as_completed(futures):
                receipts[futures[future]] = future.result()
                progress.advance(task)
        except concurrent.futures.process.BrokenProcessPool as error:
            raise OSError(
                "a worker was killed (out of memory?): run the same command again, with fewer workers"
            ) from error
        finally:
            pool.shutdown(cancel_futures=True)


def _ignore_interrupts() -> None:
    """Ctrl-C reaches every process of the terminal; the parent decides what it means."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _sample(config: PrepareConfig, documents: Documents) -> Iterator[str]:
    size = 0
    for index in range(len(documents)):
        text = documents[index]
        if text is None or is_held_out(text, config.held_out_fraction):
            continue
        yield text
        size += len(text)
        if size >= config.tokenizer_megabytes << 20:
            return


def _check_plan(
    directory: pathlib.Path, config: PrepareConfig, fingerprint: str, documents: Documents, stretches: list[Any]
) -> None:
    """Rows of two different plans must never be mixed in one directory."""
    plan = {
        "source": dataclasses.asdict(dataclasses.replace(config.source, weight=1.0)),
        "sequence_length": config.sequence_length,
        "tokenizer": fingerprint,
        "held_out_fraction": config.held_out_fraction,
        "shard_megabytes": config.shard_megabytes,
        "shards": len(stretches),
        "documents": hashlib.blake2b(documents.sizes().tobytes(), digest_size=16).hexdigest(),
    }
    path = directory / _PLAN
    if path.is_file():
        before = json.loads(path.read_text())
        for name, value in plan.items():
            if before.get(name) != value:
                raise ValueError(
                    f"{directory} was begun with {name} = {before.get(name)!r}, now it is {value!r}: "
                    "use the same settings and source, or another output directory"
                )
        return
    temporary = path.with_name(_PLAN + ".tmp")
    temporary.write_text(json.dumps(plan, indent=2) + "\n")
    os.replace(temporary, path)


def _manifest(config: PrepareConfig, rows: RowFormat, fingerprint: str, receipts: list[dict[str, Any]]) -> Manifest:
    splits: dict[str, dict[str, Any]] = {}
    for split in SPLITS:
        entries = [receipt["splits"][split] for receipt in receipts]
        splits[split] = {
            "files": [{k: e[k] for k in ("name", "rows", "file_bytes", "sha256")} for e in entries],
            **{name: sum(e[name] for e in entries) for name in ("rows", "documents", "tokens", "bytes")},
        }
    skipped: collections.Counter[str] = collections.Counter()
    for receipt in receipts:
        skipped.update(receipt["skipped"])
    tokenizer = "tokenizer.json" if config.train_tokenizer is not None else config.tokenizer
    return Manifest(rows, tokenizer, fingerprint, config.held_out_fraction, splits, dict(skipped))


def main() -> None:
    """The command line."""
    with needed("tyro", "the command line"):
        import tyro

    config = tyro.cli(PrepareConfig, prog="python -m iha_jax.data.prepare", description=__doc__)
    console = Console()
    try:
        manifest = prepare(config, console)
    except KeyboardInterrupt:
        sys.exit("interrupted: run the same command again to go on")
    except OSError as error:
        full = "the disk is full: " if error.errno == errno.ENOSPC else ""
        sys.exit(f"error: {full}{error}")
    except (ValueError, ImportError) as error:
        sys.exit(f"error: {error}")
    for split, entry in manifest.splits.items():
        console.print(
            f"{split}: {entry['rows']:,} rows of {config.sequence_length} from {entry['documents']:,} documents, "
            f"{entry['tokens']:,} tokens, {entry['bytes']:,} bytes"
        )
    if manifest.skipped:
        skips = ", ".join(f"{count:,} {reason}" for reason, count in manifest.skipped.items())
        console.print(f"skipped documents: {skips}")


if __name__ == "__main__":
    main()
