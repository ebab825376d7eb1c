"""A folder of `specscope train`: the weights of its training state, as exporting rounds them."""

import pytest

from specscope.analyze.findings import Exit
from specscope.errors import UserError
from specscope.train.eagle3 import Eagle3Training, Recipe
from specscope.train.p_eagle import PEagleRecipe, PEagleTraining
from tests.measure.trainer.runs import compared, served
from tests.train.conftest import data, target  # noqa: F401

SHORT = {"draft_vocab": 120, "epochs": 1, "batch_tokens": 256}
KINDS = {
    "eagle3": (Eagle3Training, Recipe(steps=3, **SHORT)),
    "eagle3.1": (Eagle3Training, Recipe(steps=3, norm_output=True, **SHORT)),
    "p-eagle": (PEagleTraining, PEagleRecipe(depths=3, **SHORT)),
}


@pytest.mark.every(3)
@pytest.mark.parametrize("kind", KINDS)
def test_what_training_exports_is_served_as_it_was_trained(kind, deep, data, target, tmp_path):  # noqa: F811
    training = KINDS[kind][0](target, data, KINDS[kind][1], tmp_path / "head")
    steps = training.run()
    for _ in range(2):
        next(steps)
    training.save()
    path = served(tmp_path / "run.jsonl", tmp_path / "head", target=deep, ignore_eos=True)
    audit = compared(path, tmp_path / "head")
    assert audit.exit is Exit.CONSISTENT, audit.verdict
    assert audit.weights == "training.pt"


def test_a_checkpoint_that_went_on_after_the_export(deep, data, target, tmp_path):  # noqa: F811
    kind, recipe = KINDS["eagle3"]
    training = kind(target, data, recipe, tmp_path / "head")
    steps = training.run()
    next(steps)
    training.save()
    exported = tmp_path / "exported"
    exported.mkdir()
    for name in ("config.json", "model.safetensors"):
        (exported / name).write_bytes((tmp_path / "head" / name).read_bytes())
    path = served(tmp_path / "run.jsonl", exported, target=deep, ignore_eos=True)
    for _ in range(4):
        next(steps)
    training.save()
    audit = compared(path, tmp_path / "head")
    assert audit.exit is Exit.INCONSISTENT
    assert audit.differences[0].key.startswith("weights: ")
    assert "differs (relative" in audit.differences[0].sentence


def test_a_state_that_is_torn_is_one_line(deep, data, target, tmp_path):  # noqa: F811
    training = Eagle3Training(target, data, KINDS["eagle3"][1], tmp_path / "head")
    training.save()
    path = served(tmp_path / "run.jsonl", tmp_path / "head", target=deep, ignore_eos=True, requests=1)
    (tmp_path / "head" / "training.pt").write_bytes(b"torn")
    with pytest.raises(UserError, match=r"training\.pt holds no state of this head's training"):
        compared(path, tmp_path / "head")
