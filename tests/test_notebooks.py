"""The notebooks of examples/: committed with the outputs of a real run, which mention no machine, and they run."""

import re
from pathlib import Path

import pytest
import torch

nbformat = pytest.importorskip("nbformat")
EXAMPLES = Path(__file__).parents[1] / "examples"
NOTEBOOKS = ("gsm8k", "longbench", "offload_vs_evict", "quickstart", "your_own_method")
TEXT = ("gsm8k", "longbench", "quickstart")  # these ask SmolLM2
PLACES = re.compile(r"/home/|/root/|/tmp/|/usr/|/Users/|/work/|[A-Z]:\\\\|site-packages|Traceback")
PICTURE_BYTES = 120_000


def read(name):
    return nbformat.read(EXAMPLES / f"{name}.ipynb", as_version=4)


def code(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def test_these_are_all():
    assert tuple(sorted(file.stem for file in EXAMPLES.glob("*.ipynb"))) == NOTEBOOKS


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_outputs_are_those_of_one_run_and_name_no_machine(name):
    notebook = read(name)
    nbformat.validate(notebook)
    cells = code(notebook)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell.outputs]
    kinds = {output.output_type for output in outputs}
    assert "error" not in kinds and not any(output.get("name") == "stderr" for output in outputs)
    pictures = [output.data["image/png"] for output in outputs if "image/png" in output.get("data", {})]
    assert pictures and max(map(len, pictures)) < PICTURE_BYTES
    words = [
        o.text if o.output_type == "stream" else str({k: v for k, v in o.data.items() if k != "image/png"})
        for o in outputs
    ]
    found = PLACES.search("\n".join([*words, *(cell.source for cell in notebook.cells)]))
    assert found is None, found
    assert sum(len(word) for word in words) > 200
    assert set(notebook.metadata) <= {"kernelspec", "language_info"}


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_two_lines_make_it_bigger(name):
    notebook = read(name)
    introduction, first = notebook.cells[0], code(notebook)[0]
    assert re.search(r"two\s+lines in\s+the first cell", introduction.source) and "cuda" in introduction.source
    lines = [line for line in first.source.splitlines() if re.match(r"(\w+, )?\w+(, \w+)? = ", line)]
    assert len(lines) == 2 and "MODEL" in lines[0] and lines[1].startswith('DEVICE = "cpu"')
    later = "\n".join(cell.source for cell in code(notebook)[1:])
    assert not re.search(r"^(MODEL|DEVICE|TASK|DATA)\b.*=", later, re.MULTILINE)


@pytest.mark.slow
@pytest.mark.parametrize("name", NOTEBOOKS)
def test_it_runs(name, tmp_path, monkeypatch):
    client = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    if name in TEXT:
        from kvsparse_hf import KVSparseError
        from kvsparse_hf.demo import find_model

        try:
            find_model()
        except KVSparseError as error:
            pytest.skip(str(error))
    monkeypatch.setenv("PYTHONPATH", str(EXAMPLES.parent), prepend=":")
    monkeypatch.setenv("OMP_NUM_THREADS", str(torch.get_num_threads()))  # two at once with all cores each take ten times as long
    notebook = read(name)
    client.NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(tmp_path)}}).execute()
    errors = [output for cell in code(notebook) for output in cell.outputs if output.output_type == "error"]
    assert not errors
