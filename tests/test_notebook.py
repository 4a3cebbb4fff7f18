"""The notebook runs from top to bottom."""

import pathlib

import nbclient
import nbformat
import pytest

NOTEBOOK = pathlib.Path(__file__).parents[1] / "notebooks" / "iha_colab.ipynb"


@pytest.mark.filterwarnings("default")  # Jupyter's own
def test_the_notebook_runs_in_its_short_form(tmp_path, monkeypatch):
    monkeypatch.setenv("IHA_NOTEBOOK_SHORT", "1")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path))  # no kernel of the machine's: this interpreter
    monkeypatch.delenv("XLA_FLAGS", raising=False)  # one device, as there
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    client = nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}})
    client.execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert any("largest difference" in output.get("text", "") for output in outputs)
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 3


def test_the_notebook_as_committed_is_small():
    assert NOTEBOOK.stat().st_size < 300_000
