"""What --target takes, also without a network, and refuses: damaged checkpoints, and Python code that comes along."""

import ast
import io
import json
import os
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from specscope.errors import UserError
from specscope.model.loader import load_model, load_tokenizer, pick_device, pick_dtype
from specscope.model.places import head_place, model_place
from specscope.trace.record.vocabulary import read_vocabulary
from tests.model.test_architectures import CONFIGS, build
from tests.waiting import HANG_SECONDS

CPU = torch.device("cpu")


def test_a_corrupt_gguf_is_refused_in_one_line(tmp_path):
    (tmp_path / "x.gguf").write_bytes(b"GGUFbroken")
    with pytest.raises(UserError, match="cannot load x"):
        load_model(str(tmp_path / "x.gguf"), CPU, torch.float32)


def test_devices_and_dtypes(monkeypatch):
    assert pick_dtype("bfloat16", CPU) is torch.bfloat16
    with pytest.raises(UserError, match="unknown dtype"):
        pick_dtype("int3", CPU)
    with pytest.raises(UserError, match="use auto, cpu or cuda"):
        pick_device("mps")
    assert pick_device("cpu:1") == CPU
    for there, why in ((False, "no CUDA device"), (True, "no device cuda:99: this machine has 2, counted from cuda:0")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda there=there: there)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
        with pytest.raises(UserError, match=why):
            pick_device("cuda:99")


def test_the_vocabulary_gives_every_token_its_bytes(tiny):
    tokenizer = load_tokenizer(str(tiny))
    vocabulary = read_vocabulary(tokenizer)
    text = "naïve 🙂 \n\t\x00"
    ids = tokenizer(text)["input_ids"]
    assert b"".join(vocabulary.pieces[i] for i in ids) == text.encode()
    assert vocabulary.special == {0, 1, 2}


def test_what_is_a_model_and_what_is_none(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (weights := tmp_path / "x.gguf").touch()
    assert model_place(str(tmp_path)) == head_place(str(tmp_path)) == tmp_path
    assert model_place(str(weights)) == weights
    assert model_place("owner/name") is None
    (tmp_path / "empty").mkdir()
    nowhere = dict.fromkeys(("./none", "/none/at/all", "a/b/c"), "no model at")
    for target, why in {**nowhere, "none.gguf": "no such file", str(tmp_path / "empty"): "has no config.json"}.items():
        with pytest.raises(UserError, match=why):
            model_place(target)


LOAD = """
import sys, torch
from specscope.engine.lean import import_transformers
from specscope.errors import UserError
import_transformers()
from specscope.model.loader import load_model, load_tokenizer
asked = []  # addresses, by name where the library looks the name up
sys.addaudithook(lambda event, args: asked.append(args) if event == "socket.connect" else None)
for name in sys.argv[1:]:
    try:
        load_tokenizer(name)
        print("layers", len(load_model(name, torch.device("cpu"), torch.float32).layers))
    except UserError as error:
        print("refused", error)
    print(len(asked))
    asked.clear()
"""


@pytest.mark.parametrize(
    ("endpoint", "offline"),
    [
        ("http://127.0.0.1:9", {}),
        pytest.param("http://no-such-host.invalid", {}, marks=pytest.mark.slow),
        pytest.param("http://127.0.0.1:9", {"HF_HUB_OFFLINE": "1"}, marks=pytest.mark.slow),
    ],
)
def test_without_a_network_what_was_fetched_is_loaded_and_else_a_name_is_refused(tiny, tmp_path, endpoint, offline):
    """Soon, in one line."""
    repository, commit = tmp_path / "hub" / "models--some--body", "0" * 40
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    shutil.copytree(tiny, repository / "snapshots" / commit)
    kept = {key: value for key, value in os.environ.items() if "OFFLINE" not in key}
    environment = {**kept, "HF_HOME": str(tmp_path), "HF_ENDPOINT": endpoint, **offline}
    command = [sys.executable, "-c", LOAD, "hf/none", "some/body"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=HANG_SECONDS)
    assert done.stderr == ""
    refused, attempts, loaded, more = done.stdout.splitlines()
    assert refused.startswith("refused cannot load hf/none: it is not a folder, is not in the cache, and ")
    assert offline or endpoint in refused
    assert int(attempts) <= (0 if offline else 1)  # the library would try each file six times, for a minute
    assert loaded == "layers 3"
    assert int(more) < (1 if offline else 6)  # the hub is asked once a minute


ROOT = Path(__file__).parents[2]
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


@pytest.fixture
def folder(tiny, tmp_path):
    shutil.copytree(tiny, tmp_path / "model")
    return tmp_path / "model"


def told(**changes):
    def tell(folder):
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, **changes}))

    return tell


def weights(change):
    def spoil(folder):
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    return spoil


def one_number(name, value):
    return weights(lambda t: t["model." + name].view(-1).__setitem__(3, value))


def file(name, content):
    return lambda folder: (folder / name).write_bytes(content)


def torn(share):
    def tear(folder):
        whole = (folder / "model.safetensors").read_bytes()
        (folder / "model.safetensors").write_bytes(whole[: len(whole) * share // 100])

    return tear


NUMBERS = "contains NaN or infinite numbers"
UNREADABLE = "cannot load model: "
SIZES = ("num_hidden_layers", "hidden_size", "vocab_size", "max_position_embeddings")
A_LAYER = ("num_attention_heads", "num_key_value_heads", "intermediate_size", "head_dim")  # or one for each layer
NO_SIZES = [(name, value) for name in SIZES for value in (0, "3", [1, "x"], True, 10**30)]
NO_SIZES += [(name, value) for name in A_LAYER for value in (0, "3", 10**9)]
BROKEN = [
    (
        told(model_type="gpt2"),
        r"its config says GPT2LMHeadModel, but .* lacks transformer\.h\.0\.\S+ and \d+ more; has model\.\S+ and \d+",
    ),
    (weights(lambda t: t.pop("lm_head.weight")), r"lacks lm_head\.weight$"),
    (told(num_hidden_layers=99), r"lacks model\.layers\.10\.\S+ and \d+ more"),
    (told(num_hidden_layers=2), r"has model\.layers\.2\.\S+ and 8 more, which this kind of model lacks"),
    (told(intermediate_size=96), r"holds model\.layers\.0\.mlp\.\S+ as \[\d+, \d+\] instead of \[\d+, \d+\]"),
    (one_number("norm.weight", torch.nan), f"norm.weight {NUMBERS}"),
    (one_number("layers.2.mlp.up_proj.weight", -torch.inf), f"layers.2.mlp.up_proj.weight {NUMBERS}"),
    (weights(lambda t: [x.zero_() for x in t.values()]), "contains only zeros"),
    (
        weights(lambda t: t["model.layers.1.self_attn.o_proj.weight"].zero_()),
        r"model\.layers\.1\.self_attn\.o_proj\.weight contains only zeros",
    ),
    *[(told(**{name: value}), rf"config.json is not usable: .* at `\$\.{name}`") for name, value in NO_SIZES],
    *[(file("config.json", text), "config.json is not JSON") for text in (b"\x00broken", b"")],
    (file("config.json", b"[1]"), "config.json is not a JSON object"),
    (file("config.json", b'{"a":' * 100_000), "config.json is not usable: its JSON is nested too deep"),
    *[(file("config.json", text), UNREADABLE) for text in (b"{}", b'{"model_type": "none such"}')],
    *[(torn(share), UNREADABLE) for share in (0, 50, 99)],
    (file("model.safetensors", b"\xff" * 8 + b"x" * 100_000), UNREADABLE),
]


@pytest.mark.parametrize(("spoil", "match"), BROKEN)
def test_what_is_not_whole_is_refused(folder, spoil, match):
    spoil(folder)
    with pytest.raises(UserError, match=match) as error:
        load_model(str(folder), CPU, torch.float32)
    assert "\n" not in str(error.value)
    assert "model" in str(error.value)


@pytest.mark.every(3)
@pytest.mark.parametrize("name", sorted(set(CONFIGS) - {"step3p7"}))  # a folder of which is refused: it sees images
def test_whole_models_of_every_family_are_taken_and_compute_the_same(name, tmp_path):
    build(name).save_pretrained(tmp_path / "model")
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    loaded = load_model(str(tmp_path / "model"), CPU, torch.float32).model
    for key, buffer in plain.named_buffers():
        assert torch.equal(loaded.get_buffer(key), buffer), key
    state = loaded.state_dict()
    assert all(torch.equal(state[key], tensor) for key, tensor in plain.state_dict().items())
