"""A document larger than memory: packed in pieces, by a process that couldn't hold it in one."""

import os
import pathlib
import subprocess
import sys

import pytest

_SCRIPT = """
import pathlib, re, resource, sys

from iha_jax.data import ByteTokenizer, SourceConfig
from iha_jax.data.packing import document_pairs
from iha_jax.data.prepare import PrepareConfig, prepare
from iha_jax.data.text_files import TextFiles

path, output, more = sys.argv[1], sys.argv[2], int(sys.argv[3])
now = 1024 * int(re.search(r"VmData:\\s+(\\d+) kB", pathlib.Path("/proc/self/status").read_text())[1])
resource.setrlimit(resource.RLIMIT_DATA, (now + more, now + more))
config = PrepareConfig(output, SourceConfig("files", path), sequence_length=1 << 16, held_out_fraction=0.0, workers=1)
entry = prepare(config).splits["train"]
print(entry["bytes"], entry["tokens"], entry["documents"])
try:
    document_pairs(ByteTokenizer(), TextFiles([path], max_document_bytes=1 << 40)[0])
    print("fits in one piece")
except MemoryError:
    print("does not fit in one piece")
"""


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="the memory in use is read from /proc")
def test_a_document_larger_than_memory_is_packed_in_pieces(tmp_path):
    # In one piece, 256 MiB of text would be 2.5 GiB with its ids. The process may grow by half of that: pieces of
    # 16 MiB take 0.3 GiB, and the threads of ArrayRecord reserve as much again without using it.
    line = "A line of a very long document, the same again and again: é.\n".encode()
    size = 256 << 20
    path = tmp_path / "large.txt"
    with open(path, "wb") as file:
        for _ in range(size // len(line) // 1024):
            file.write(line * 1024)
    written = path.stat().st_size
    root = str(pathlib.Path(__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT, str(path), str(tmp_path / "rows"), str(1280 << 20)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])},
        capture_output=True,
        text=True,
        check=False,
    )
    path.unlink()
    assert done.returncode == 0, done.stderr
    counts, control = done.stdout.splitlines()
    size, tokens, documents = map(int, counts.split())
    assert size == written
    assert documents == -(-written // (16 << 20))
    assert tokens == written + documents  # one more target than bytes for every document: its end
    assert control == "does not fit in one piece"
