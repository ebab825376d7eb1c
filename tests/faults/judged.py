"""What diagnose says of a run of the tiny models, with them at hand."""

from __future__ import annotations

from pathlib import Path

from specscope.analyze.diagnose.diagnosis import Diagnosis
from specscope.analyze.diagnose.run import examine
from specscope.measure.judges import audit_options
from specscope.measure.locate.locate import locate
from specscope.trace.wire.reading import read_capture
from tests.faults.planted import FAULTS
from tests.faults.settings import DRAFTERS, SETTINGS, Setting, record

SAMPLE = 400  # steps that are audited


def diagnosed(path: Path, setting: Setting, *, place: bool = False) -> Diagnosis:
    """A capture of the tiny models, judged with them at hand. `place`: and what is wrong is located."""
    reader = read_capture(path)
    draft = DRAFTERS[setting.drafter].get("draft_model")
    options = audit_options(reader.history, str(setting.target), draft, SAMPLE)

    located = (lambda session, little: locate(session, little=little)) if place else None
    return examine(reader.history, str(path), options, warnings=reader.warnings, locate=located)


def planted(name: str, folder: Path, *, rarely: bool = False) -> Diagnosis:
    """A fault's run, recorded and judged. `rarely`: with the fault in a few of its steps."""
    fault = FAULTS[name]
    setting, path = SETTINGS[fault.setting], folder / f"{name.replace(' ', '_')}{'-rare' * rarely}.jsonl"
    return diagnosed(path if path.exists() else record(setting, path, fault, rarely=rarely), setting)
