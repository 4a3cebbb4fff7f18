"""The code of this repository as one archive, for machines that start empty."""

import gzip
import io
import pathlib
import subprocess
import tarfile

ROOT = pathlib.Path(__file__).resolve().parents[1]
_LEFT_OUT = {".git", ".venv", "runs", "build", "dist", "__pycache__"}


class Package:
    """The files of a folder as they are now: what git tracks or would add, or all but built ones without git.

    Args:
      root: the folder; None, the one this module is in.

    Raises:
      ValueError: the folder has no ``train.py``.
    """

    def __init__(self, root: pathlib.Path | None = None):
        root = ROOT if root is None else root
        if not (root / "train.py").is_file():
            raise ValueError(f"expected a checkout of this repository, with train.py, at {str(root)!r}")
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w") as archive:
            for name in _files(root):
                archive.add(root / name, arcname=name, recursive=False)
        # Without a time in it, the same files give the same bytes.
        self._content = gzip.compress(buffer.getvalue(), mtime=0)

    def write(self, path: str) -> None:
        """Writes the archive, a gzipped tar file."""
        pathlib.Path(path).write_bytes(self._content)


def _files(root: pathlib.Path) -> list[str]:
    try:
        listed = subprocess.run(
            ["git", "-C", str(root), "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
            capture_output=True,
            check=True,
        ).stdout
        names = {name.decode() for name in listed.split(b"\0") if name}
    except (OSError, subprocess.CalledProcessError):
        names = {
            str(path.relative_to(root))
            for path in root.rglob("*")
            if not _LEFT_OUT.intersection(path.relative_to(root).parts)
        }
    # A file deleted but not committed is still listed.
    return sorted(name for name in names if (root / name).is_file())
