"""What judges say of a run of the tiny models, with them at hand."""

from contextlib import nullcontext
from types import SimpleNamespace

from specscope.analyze.diagnose.diagnosis import JudgedCase
from specscope.analyze.diagnose.run import examine
from specscope.analyze.locate.located import Stage
from specscope.analyze.verify.trial import Case, judge
from specscope.measure.judges import audit_options
from specscope.measure.locate.locate import locate
from specscope.trace.wire.reading import read_capture
from tests.faults.fault import in_every_engine
from tests.faults.settings import DRAFTERS, history

SAMPLE = 400  # steps that are audited
NOTHING = SimpleNamespace(findings=(), finding=lambda name: None)  # an audit that found nothing


def diagnosed(path, setting, *, place=False):
    """A capture of the tiny models, judged with them at hand. `place`: and what is wrong is located."""
    reader = read_capture(path)
    draft = DRAFTERS[setting.drafter].get("draft_model")
    options = audit_options(reader.history, str(setting.target), draft, SAMPLE)

    located = (lambda session, little: locate(session, little=little)) if place else None
    return examine(reader.history, str(path), options, warnings=reader.warnings, locate=located)


def walked(path, target, draft=None, install=None, *stages):
    """The walk over a capture, of drafters where nothing else is named, by an engine into which a fault is put."""
    run = history(path)
    options = audit_options(run, str(target), draft, None)
    with nullcontext() if install is None else in_every_engine(install):
        session = JudgedCase(Case(run, judge(run, source="run")), NOTHING, options)
        return locate(session, stages=stages or (Stage.DRAFTER,))
