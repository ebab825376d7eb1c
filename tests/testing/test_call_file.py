"""`specscope verify call.npz` and call.pt: the names and shapes that people dump, and bad files in one line."""

import json
import pickle
import subprocess
import sys

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from specscope.cli.main import cli
from specscope.errors import UserError
from specscope.testing.calls import NAMES, read_calls
from tests.testing.samplers import arrays, calls

MADE = calls(30, 7)
DUMP = arrays(MADE)
SINGLE = {name: array[0] for name, array in DUMP.items()}


def logits(rows, temperature=1.0):
    with np.errstate(divide="ignore"):
        return np.log(rows.astype(np.float64)) * temperature + 3


def packed(of):
    """As vLLM's rejection sampler is called: the drafts of all requests end to end."""
    return {
        "target_logits": np.concatenate([logits(call.p) for call in of]),
        "draft_probs": np.concatenate([call.q for call in of]),
        "draft_token_ids": np.concatenate([call.drafted for call in of]),
        "output_token_ids": DUMP["output_token_ids"],
        "cu_num_draft_tokens": np.cumsum([len(call.drafted) for call in of]),
    }


FORMS = {
    "a batch": DUMP,
    "by our names": {name: DUMP[others[0]] for name, others in NAMES.items() if others and others[0] in DUMP},
    "packed": packed(MADE),
    "logits at a temperature": {
        "logits": logits(DUMP["target_probs"], 0.7),
        "draft_logits": logits(DUMP["draft_probs"], 0.7),
        "temperature": np.float32(0.7),
        **{name: DUMP[name] for name in ("draft_token_ids", "output_token_ids")},
    },
    "the drafts padded": DUMP
    | {
        "draft_token_ids": np.pad(DUMP["draft_token_ids"], ((0, 0), (0, 1)), constant_values=-1),
        "target_probs": np.pad(DUMP["target_probs"], ((0, 0), (0, 1), (0, 0)), mode="edge"),
        "draft_probs": np.pad(DUMP["draft_probs"], ((0, 0), (0, 1), (0, 0)), mode="edge"),
    },
}


def saved(folder, dump, name="call.npz"):
    path = folder / name
    if name.endswith(".npz"):
        np.savez(path, **dump)
    else:
        torch.save({key: torch.tensor(value) for key, value in dump.items()}, path)
    return str(path)


@pytest.mark.parametrize("kind", ["npz", "pt"])
@pytest.mark.parametrize("form", FORMS)
def test_forms_of_the_same_calls_are_the_same(tmp_path, form, kind):
    found, notes = read_calls(saved(tmp_path, FORMS[form], f"call.{kind}"))
    assert (len(found), notes) == (30, ())
    for one, wanted in zip(found, MADE, strict=True):
        np.testing.assert_allclose(one.p, wanted.p, atol=1e-6)
        np.testing.assert_allclose(one.q, wanted.q, atol=1e-6)
        assert one.drafted.tolist() == wanted.drafted.tolist()
        assert one.output.tolist() == wanted.output.tolist()


def test_one_call_with_coins_and_in_bfloat16(tmp_path):
    coins = {"uniform_samples": np.full(3, 0.5), "coins_for_final_sampling": np.array([0.25])}
    path = tmp_path / "one.pt"
    torch.save({name: torch.tensor(value) for name, value in (SINGLE | coins).items()}, path)
    (call,), _ = read_calls(str(path))
    assert (call.coin.tolist(), call.final_coin) == ([0.5, 0.5, 0.5], 0.25)
    halved = {name: torch.tensor(value) for name, value in SINGLE.items()}
    torch.save(halved | {name: halved[name].bfloat16() for name in ("target_probs", "draft_probs")}, path)
    (call,), _ = read_calls(str(path))
    np.testing.assert_allclose(call.p, SINGLE["target_probs"], atol=4e-3)


def test_what_is_not_used_is_said(tmp_path):
    empty = DUMP | {"seed": np.arange(3), "draft_token_ids": DUMP["draft_token_ids"].copy()}
    empty["draft_token_ids"][4] = -1
    found, notes = read_calls(saved(tmp_path, empty))
    assert len(found) == 29
    assert notes == ("not used: seed", "1 of 30 calls have no drafts and are left out")


def lacking(name):
    return {key: value for key, value in DUMP.items() if key != name}


def spoiled(name, value):
    array = DUMP[name].astype(float)
    array.flat[1] = value
    return DUMP | {name: array}


BAD = {
    "nothing drafted": (
        lacking("draft_token_ids"),
        "has no drafted, draft_token_ids, .*; it has draft_probs, output_tok",
    ),
    "no target": (lacking("target_probs"), "has no p, target_probs, target_p, target_prob, logits; it has"),
    "no output": (lacking("output_token_ids"), "has no output, output_token_ids"),
    "twice": (DUMP | {"p": DUMP["target_probs"]}, "has p by two names: leave one of p, target_probs, "),
    "NaN": (spoiled("target_probs", np.nan), "target_probs in .* has NaN"),
    "no probabilities": (spoiled("draft_probs", 3.0), r"draft_probs in .* has a row that sums to 3\.\d+"),
    "a coin that is none": (DUMP | {"coin": np.full((30, 3), 1.5)}, "coin in .* has values outside 0 to 1"),
    "not whole numbers": (
        spoiled("draft_token_ids", 1.5),
        "draft_token_ids in .* has values that are not whole numbers",
    ),
    "outside the vocabulary": (
        spoiled("draft_token_ids", 99),
        r"call 0 in .*: drafted is .* 99, \d+\], but the voc",
    ),
    "words": (lacking("target_probs") | {"p": np.array(["a"])}, r"p in .* is \[1\] of <U1: it must hold numbers"),
    "other shapes": (
        DUMP | {"draft_probs": DUMP["draft_probs"][:, :1]},
        r"0 .*: q is \[1, 16\], which does not fit 3",
    ),
    "another vocabulary": (
        DUMP | {"draft_probs": np.full((30, 3, 5), 0.2)},
        "has vocabularies of different sizes: 16 tokens in target_probs, 5 tokens in draft_probs",
    ),
    "fewer outputs": (
        lacking("output_token_ids") | {"output": DUMP["output_token_ids"][:9]},
        "has 30 calls .*, but 9 by output",
    ),
    "counts that do not sum": (packed(MADE) | {"cu_num_draft_tokens": np.array([3, 6])}, "calls by its drafts"),
    "a tree": (
        DUMP | {"retrive_next_sibling": np.zeros((30, 4))},
        "has retrive_next_sibling: its drafts are a tree, and calls are judged of chains alone",
    ),
    "a number alone": (SINGLE | {"draft_token_ids": np.array(3)}, "call 0 in .*"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_arrays_are_one_line(tmp_path, name):
    dump, says = BAD[name]
    with pytest.raises(UserError, match=says) as raised:
        read_calls(saved(tmp_path, dump))
    assert "\n" not in str(raised.value)


class Runs:
    def __reduce__(self):
        return (open, ("ran", "w"))


def broken(folder, name):
    """A file that must not be read."""
    path = folder / name
    whole = (folder / "whole.npz", folder / "whole.pt")
    np.savez(whole[0], **DUMP)
    torch.save({key: torch.tensor(value) for key, value in DUMP.items()}, whole[1])
    if name == "objects.npz":
        np.savez(path, **DUMP, more=np.array([Runs()], object))
    elif name == "objects.pt":
        torch.save({"p": Runs()}, path)
    elif name == "list.pt":
        torch.save([torch.ones(2)], path)
    elif name == "plain.pkl":
        path.write_bytes(pickle.dumps({"p": [1.0]}))
    else:
        text = whole[name.endswith("pt")].read_bytes()
        path.write_bytes(text[: len(text) // 2] if "cut" in name else text[:90] + b"\xff" * 40 + text[130:])
    return str(path)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("objects.npz", "holds pickled Python objects, which specscope never loads: save numbers"),
        ("objects.pt", "is damaged or holds more than tensors"),
        ("list.pt", "holds a list: save a dictionary of tensors by name"),
        ("plain.pkl", "is a Python pickle"),
        ("cut.npz", "is damaged or cut off"),
        ("cut.pt", "is damaged or holds more than tensors"),
        ("flipped.npz", "is damaged or cut off"),
    ],
)
def test_bad_files_are_one_line_and_nothing_is_run(tmp_path, monkeypatch, name, says):
    monkeypatch.chdir(tmp_path)
    path = broken(tmp_path, name)
    done = CliRunner().invoke(cli, ["verify", path])
    assert isinstance(done.exception, UserError), done.output
    assert says in str(done.exception)
    assert "\n" not in str(done.exception)
    assert not (tmp_path / "ran").exists()


def run(*words):
    """What the command prints, and its exit code."""
    done = CliRunner().invoke(cli, ["verify", *words])
    return done.exit_code, done.output


def test_the_command_judges_them(tmp_path):
    code, text = run(saved(tmp_path, arrays(calls(200, 3))))
    assert code == 0
    assert "✓ possible outputs" in text
    assert "consistent with standard: 200 calls, 600 drafted tokens" in text
    assert "not greedy: possible outputs: call 0: " in text
    bad = saved(tmp_path, arrays(calls(200, 3, "residual from raw p")), "bad.npz")
    code, text = run(bad)
    assert code == 1
    assert "as if the token after a rejection is drawn from p" in " ".join(text.split())
    code, text = run(bad, "--json", "--rule", "standard")
    one = json.loads(text)
    assert (code, one["exit"], one["schema"]) == (1, 1, "specscope.verify/1")
    (capture,) = one["captures"]
    assert capture["refuted"]["standard"].startswith("possible outputs: call ")
    assert capture["mistake"].startswith("the token after a rejection is drawn from p")
    assert capture["impossible"][0][1]
    assert capture["checks"][0]["failed"] == len(capture["impossible"])


def test_arrays_are_judged_without_torch(tmp_path):
    code = f"import sys; from specscope.cli.main import cli; sys.argv[1:] = ['verify', {saved(tmp_path, DUMP)!r}]\n"
    code += "try: cli()\nexcept SystemExit as end: assert end.code == 0\nassert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
