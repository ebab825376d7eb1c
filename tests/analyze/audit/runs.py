"""Runs of tiny engines, and what an audit by their own models makes of them."""

from pathlib import Path

from specscope import SamplingParams
from specscope.analyze.audit.audit import audit
from specscope.analyze.audit.options import ModelSource, Options
from specscope.trace.history.history import History
from tests.dflash import write_speculators
from tests.engines import DRAFTERS, PROMPTS, fresh, tiny_engine, with_modules
from tests.heads import VARIANTS, head_tensors, write_head, write_parallel_head, write_variant
from tests.own import Bigrams

RULES = {
    "greedy": {},
    "temperature": {"temperature": 1.0},
    "cold": {"temperature": 0.3},
    "top-k": {"temperature": 0.8, "top_k": 20},
    "top-p": {"temperature": 1.2, "top_p": 0.8},
    "min-p": {"temperature": 1.0, "min_p": 0.05},
    "penalties": {"temperature": 0.9, "repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": 0.5},
    "greedy penalties": {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": 0.5},
    "bias": {"temperature": 1.0, "logit_bias": {5: 4.0, 70: 3.0}},
    "all": {
        "temperature": 0.7,
        "top_k": 50,
        "top_p": 0.9,
        "min_p": 0.01,
        "repetition_penalty": 1.1,
        "logit_bias": {100: 2.0},
    },
}
SETTINGS = {
    **DRAFTERS,
    "same model": {"drafter": "draft_model", "draft_model": "same", "tree": "[(0,), (1,), (0, 0), (1, 0), (0, 0, 0)]"},
    "same model, top": {
        "drafter": "draft_model",
        "draft_model": "same",
        "tree": "top:[(0,), (1,), (0, 0), (1, 0), (0, 0, 0)]",
    },
    "dynamic model": {"drafter": "draft_model", "draft_model": "self:5", "tree": "dynamic:8,depth=3,top=3"},
}
OWN = {"drafter": Bigrams, "tree": "[(0,), (1,), (0, 0)]"}  # which no judge knows
SMALL = {"max_batch": 3, "max_step_tokens": 24}


class Bench:
    """Engines over one tiny target, each built when it is first asked for."""

    def __init__(self, target, folder, **more):
        """`more`: settings of all of them."""
        self.target, self.more = str(target), more
        self.heads = {
            "eagle": str(write_head(Path(folder) / "head", head_tensors())),
            "p-eagle": str(write_parallel_head(Path(folder) / "parallel")),
            "dflash": str(write_speculators(Path(folder) / "block")),
            "eagle-1": str(write_head(Path(folder) / "first", head_tensors(version=1, bias=True))),
            **{name: str(write_variant(Path(folder) / name, name)) for name in VARIANTS},
        }
        self.targets = with_modules(target, Path(folder))
        self._made, self._ran = {}, {}

    def fresh(self, name, **more):
        """An engine of its own, for a test that breaks it, or with `more` settings."""
        how = dict(OWN if name == "own" else SETTINGS.get(name, SETTINGS["eagle dynamic"]))
        if how["drafter"] in ("eagle", "dflash"):
            how["draft_model"] = self.heads.get(name, self.heads.get(name.split()[0], self.heads["eagle"]))
        if how.get("draft_model") == "same":
            how["draft_model"] = self.target
        return tiny_engine(self.targets.get(name, self.target), **{**SMALL, **how, **self.more, **more})

    def engine(self, name):
        """One that several tests share."""
        if name not in self._made:
            self._made[name] = self.fresh(name)
        return self._made[name]

    def ran(self, name, rule, tokens=12, prompts=3):
        """A history of the shared engine, made when it is first asked for."""
        key = name, rule, tokens, prompts
        if key not in self._ran:
            fresh(self.engine(name), 60)
            self._ran[key] = run(self.engine(name), RULES[rule], tokens, PROMPTS[:prompts])
        return self._ran[key]

    def options(self, engine, sample=None):
        """The models that judge it."""
        draft = None
        if engine.config.drafter in ("eagle", "dflash"):
            draft = ModelSource(engine.config.draft_model, "head", kind=engine.config.drafter)
        if engine.config.drafter == "mtp":
            draft = ModelSource(engine.config.target, "modules", kind="mtp")
        if engine.config.drafter == "draft_model":
            layers = engine.config.draft_layers
            draft = ModelSource(self.target, "draft", {} if layers is None else {"num_hidden_layers": layers})
        return Options(ModelSource(engine.config.target, "tiny"), draft, sample)

    def audit(self, engine, history, **how):
        """By plain transformers."""
        return audit(history, "run.jsonl", self.options(engine, **how))


def run(engine, rule, tokens=24, prompts=PROMPTS):
    """The history of a run of all prompts."""
    for seed, prompt in enumerate(prompts):
        params = SamplingParams(**{"max_tokens": tokens, "seed": seed, "ignore_eos": True, **rule})
        engine.add(prompt, params, labels={"kind": "even" if seed % 2 == 0 else "odd"})
    return drained(engine)


def drained(engine):
    """The history of what an engine does until all its requests have ended."""
    history = History(engine.run_info, engine.vocabulary)
    while engine.busy:
        history.append(engine.step())
    return history


def failed(found):
    """The names of the checks that failed."""
    return {finding.name for finding in found.findings if finding.failed}
