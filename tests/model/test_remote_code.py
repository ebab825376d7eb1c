"""Python code that comes with a model is never run, and nobody is asked whether it may be."""

import ast
import io
import json
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch

from specscope.errors import UserError
from specscope.model.loader import load_model, load_tokenizer

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
KINDS = {
    "model": ("config.json", {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}, {"model_type": "own"}),
    "tokenizer": (
        "tokenizer_config.json",
        {"AutoTokenizer": ["own.Tokenizer", None]},
        {"tokenizer_class": "OwnTokenizer"},
    ),
}


@pytest.fixture(params=KINDS)
def own(request, tiny, tmp_path, monkeypatch):
    """(what has code of its own, its folder, the file that the code would leave); whoever asks is answered yes."""
    folder, ran = shutil.copytree(tiny, tmp_path / "own"), tmp_path / "ran"
    name, code, other = KINDS[request.param]
    changed = json.loads((folder / name).read_text()) | {"auto_map": code} | other
    changed.pop("architectures", None)
    (folder / name).write_text(json.dumps(changed))
    (folder / "own.py").write_text(f"open({str(ran)!r}, 'w')\n")
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n" * 9))
    return request.param, folder, ran


def test_it_is_not_run(own):
    what, folder, ran = own
    load = load_tokenizer if what == "tokenizer" else partial(load_model, device=CPU, dtype=torch.float32)
    with pytest.raises(UserError, match=r"own: it needs its own Python code, which specscope never runs$"):
        load(str(folder))
    assert not ran.exists()


def test_every_load_says_so():
    """`Auto*.from_pretrained` asks on standard input where it is not told."""
    texts = {path: path.read_text() for path in (ROOT / "specscope").rglob("*.py")}
    for path in [path for path, text in texts.items() if ".from_pretrained" in text]:
        for node in ast.walk(ast.parse(texts[path])):
            if not isinstance(node, ast.Call):
                continue
            parts = [ast.unparse(part) for part in (node.func, *node.args)]  # partial() takes it as an argument
            if any(part.startswith("Auto") and part.endswith(".from_pretrained") for part in parts):
                given = {word.arg: ast.unparse(word.value) for word in node.keywords}
                assert given.get("trust_remote_code") == "False", f"{path}:{node.lineno}"
