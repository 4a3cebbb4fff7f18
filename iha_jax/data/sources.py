"""From a source's description to its documents: the interpreter's library, files by format, datasets by name."""

import glob
import os
import pathlib
import sysconfig

from iha_jax.data.config import SourceConfig
from iha_jax.data.documents import Concatenated, Documents
from iha_jax.data.tables import HubDataset, ParquetFiles
from iha_jax.data.text_files import JsonLines, TextFiles

_JSONL = (".jsonl", ".ndjson")


def open_documents(source: SourceConfig) -> Documents:
    """The documents of a source of kind "stdlib", "files" or "hub".

    Raises:
      FileNotFoundError: nothing is at the path.
      ValueError: there is no document at all, or a column is missing.
      ImportError: a package that reads the format is missing, naming the extra.
    """
    field = None if source.format == "chat" else source.text_field
    if source.kind == "stdlib":
        return TextFiles(stdlib_paths())
    if source.kind == "hub":
        return HubDataset(source.path, source.subset, source.split, field)
    if source.kind != "files":
        raise ValueError(f"a source of kind {source.kind!r} holds rows, not documents")
    paths = _expand(source.path)
    parts: list[Documents] = []
    if jsonl := [p for p in paths if p.endswith(_JSONL)]:
        parts.append(JsonLines(jsonl, field))
    if parquet := [p for p in paths if p.endswith(".parquet")]:
        parts.append(ParquetFiles(parquet, field))
    if field is None and len(parts) == 0:
        raise ValueError(f"{source.path!r} holds no .jsonl or .parquet file, which conversations are read from")
    if text := [p for p in paths if not p.endswith((*_JSONL, ".parquet"))]:
        if field is None:
            raise ValueError(f"conversations are read from .jsonl and .parquet files, got {text[0]!r} too")
        parts.append(TextFiles(text))
    documents = parts[0] if len(parts) == 1 else Concatenated(parts)
    if len(documents) == 0:
        raise ValueError(f"{source.path!r} holds no document: all {len(paths)} files are empty")
    return documents


def stdlib_paths() -> list[str]:
    """The running interpreter's library sources, sorted; installed packages and test suites left out."""
    root = sysconfig.get_path("stdlib")
    left_out = {"site-packages", "dist-packages", "__pycache__", "test", "tests"}
    paths = []
    for directory, children, files in os.walk(root):
        children[:] = sorted(c for c in children if c not in left_out)
        paths += [os.path.join(directory, f) for f in files if f.endswith(".py")]
    return sorted(paths)


def _expand(path: str) -> list[str]:
    """Files of a path, directory (recursively, hidden ones left out) or glob, sorted."""
    expanded = os.path.expanduser(path)
    if os.path.isdir(expanded):
        found = [
            str(p)
            for p in pathlib.Path(expanded).rglob("*")
            if p.is_file() and not any(part.startswith(".") for part in p.relative_to(expanded).parts)
        ]
    else:
        found = [p for p in glob.glob(expanded, recursive=True) if os.path.isfile(p)]
    if not found:
        raise FileNotFoundError(f"no file at {path!r}: expected a file, a directory with files, or a glob")
    return sorted(found)
