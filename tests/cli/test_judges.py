"""Which models judge a capture: those that are named, else the capture's own where they are what they were."""

import shutil
from dataclasses import replace

import pytest
from safetensors.torch import load_file, save_file

from specscope import Engine
from specscope.errors import UserError
from specscope.measure.judges import audit_options, engine_config_of
from specscope.trace.history.history import History
from tests.heads import head_tensors, write_head


@pytest.fixture
def model(deep, tmp_path):
    """A target of its own, which a test may change."""
    return shutil.copytree(deep, tmp_path / "model")


@pytest.fixture
def head(tmp_path):
    return write_head(tmp_path / "head", head_tensors())


def run_of(target, **config):
    return Engine(target=str(target), dtype="float32", kv_memory=0.01, threads=1, **config).run_info


@pytest.fixture(scope="module")
def recorded(deep, tmp_path_factory):
    """What a run tells of its target and its head."""
    head = write_head(tmp_path_factory.mktemp("recorded") / "head", head_tensors())
    return run_of(deep, drafter="eagle", draft_model=str(head), tree="3")


@pytest.fixture
def history(recorded, model, head):
    """The same run over models that a test may change."""
    return History(replace(recorded, target="model", target_path=str(model), draft_path=str(head)))


def change(folder):
    """Other weights of the same size."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    name = min(tensors)
    tensors[name] = tensors[name] + 0.5
    save_file(tensors, file, metadata={"format": "pt"})


def test_a_capture_tells_where_its_models_lay_and_what_they_were(recorded, deep, model, head, history):
    run = history.run
    assert recorded.target_path == str(deep)
    assert recorded.draft_path.endswith("/head")
    assert len(run.target_digest) == len(run.draft_digest) == 32
    options = audit_options(history, None, None, None)  # and they are used where they are that still
    assert (options.target.path, options.draft.path) == (str(model), str(head))
    assert (options.notes, options.why_no_draft) == ((), "")
    again = engine_config_of(run, None, None)
    assert (again.target, again.draft_model) == (str(model), str(head))
    some = run_of(model, drafter="draft_model", draft_model="self:2", tree="3")
    assert (some.draft_path, some.draft_digest) == ("self:2", f"{run.target_digest}:2")
    none = run_of(model, drafter="none")
    assert (none.target_digest, none.draft_path, none.draft_digest) == (run.target_digest, "", "")


def test_a_head_of_another_kind_is_refused_as_what_it_is(head, history):
    (head / "config.json").write_text('{"architectures": ["DFlash2DraftModel"]}')
    said = f"{head} holds a drafter of the kind DFlash2: audit judges EAGLE, EAGLE-3, P-EAGLE and DFlash heads"
    options = audit_options(history, None, None, None)
    assert (options.draft, options.why_no_draft) == (None, said)
    with pytest.raises(UserError, match="holds a drafter of the kind DFlash2"):
        audit_options(history, None, str(head), None)


def test_another_target_in_its_place_is_not_used(model, history):
    change(model)
    with pytest.raises(UserError, match=r"^the capture's model model at .* has other weights.*give --target MODEL$"):
        audit_options(history, None, None, None)
    options = audit_options(history, str(model), None, None)  # as given, and it is said
    assert len(options.notes) == 1
    assert "--target" in options.notes[0]
    assert "has other weights or settings than the capture's model model (digest" in options.notes[0]


def test_another_head_in_its_place_is_not_used(head, history):
    change(head)
    options = audit_options(history, None, None, None)
    assert options.draft is None
    assert options.why_no_draft.startswith(f"the capture's head head at {head} has other weights or settings now (dig")
    assert options.why_no_draft.endswith("give --draft-model HEAD")
    assert "\n" not in options.why_no_draft
    given = audit_options(history, None, str(head), None)
    assert given.draft.path == str(head)
    assert "--draft-model" in given.notes[0]


def test_what_is_gone_is_named_with_its_flag(model, head, history):
    shutil.rmtree(head)
    said = "the head head was not found: give --draft-model HEAD"
    assert audit_options(history, None, None, None).why_no_draft == said
    shutil.rmtree(model)
    with pytest.raises(UserError, match="the capture's model model was not found: give --target MODEL"):
        audit_options(history, None, None, None)


def test_what_a_capture_names_is_never_fetched(recorded, monkeypatch):
    """A hub name is looked for in the cache alone, even where the hub could be asked."""
    import specscope.model.loader as loader

    def ask(name):
        raise AssertionError(f"the hub is asked for {name}")

    monkeypatch.setattr(loader, "hub_arguments", ask)
    for told in ({"target": "some/model", "target_path": ""}, {"target": "model", "target_path": "some/model"}):
        history = History(replace(recorded, target_digest="", **told))
        with pytest.raises(UserError, match="was not found: give --target MODEL"):
            audit_options(history, None, None, None)
