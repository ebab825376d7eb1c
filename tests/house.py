"""The measures of tests/test_house.py, and what breaks them today."""

import ast
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parent.parent
MOST_LINES, FEWEST_LINES = 700, 60
MOST_FILES = 20  # of a folder
CROWDED: dict[str, int] = {
    "specscope/analyze/compare": 24,
    "specscope/cli": 26,
    "specscope/engine": 24,
    "specscope/model": 29,
    "specscope/tui/widgets": 24,
    "specscope/vllm": 36,
}
NAMES: dict[str, int] = {}
FRAGMENTS: dict[str, int] = {
    "benchmarks/processor.py": 1,
    "benchmarks/scale_plot.py": 1,
    "kernels/kv_write.py": 1,
    "kernels/place.py": 1,
    "specscope/analyze/audit/options.py": 1,
    "specscope/analyze/audit/shelf.py": 1,
    "specscope/analyze/audit/verdict.py": 1,
    "specscope/analyze/compare/page.py": 1,
    "specscope/analyze/compare/text.py": 1,
    "specscope/analyze/diagnose/rerun/models.py": 1,
    "specscope/analyze/significance.py": 1,
    "specscope/analyze/verify/arrays.py": 1,
    "specscope/analyze/verify/by_rule.py": 1,
    "specscope/analyze/walk.py": 1,
    "specscope/bench/loads.py": 1,
    "specscope/cli/attach.py": 1,
    "specscope/cli/bench_files.py": 1,
    "specscope/cli/export.py": 1,
    "specscope/cli/numbers.py": 1,
    "specscope/cli/verify.py": 1,
    "specscope/debug/passive.py": 1,
    "specscope/debug/show_spans.py": 1,
    "specscope/debug/show_stop.py": 1,
    "specscope/debug/stops.py": 1,
    "specscope/debug/views.py": 1,
    "specscope/engine/clock.py": 1,
    "specscope/engine/gate.py": 1,
    "specscope/engine/models_given.py": 1,
    "specscope/engine/warm_up.py": 1,
    "specscope/envelope.py": 1,
    "specscope/errors.py": 1,
    "specscope/live/local.py": 1,
    "specscope/live/messages.py": 1,
    "specscope/live/output.py": 1,
    "specscope/model/backend.py": 1,
    "specscope/model/device.py": 1,
    "specscope/model/meta.py": 1,
    "specscope/model/quiet.py": 1,
    "specscope/model/segment.py": 1,
    "specscope/model/stack.py": 1,
    "specscope/model/warm_up.py": 1,
    "specscope/remote/guard.py": 1,
    "specscope/serve/fields.py": 1,
    "specscope/serve/text.py": 1,
    "specscope/speculate/drafters/level.py": 1,
    "specscope/speculate/likeliest.py": 1,
    "specscope/speculate/raw_rows.py": 1,
    "specscope/speculate/tokens.py": 1,
    "specscope/speculate/verify/device.py": 1,
    "specscope/speculate/verify/distribution.py": 1,
    "specscope/terminal.py": 1,
    "specscope/trace/changes.py": 1,
    "specscope/trace/compressed.py": 1,
    "specscope/trace/record/equal.py": 1,
    "specscope/trace/history/faults.py": 1,
    "specscope/trace/record/form.py": 1,
    "specscope/trace/record/limits.py": 1,
    "specscope/trace/record/logprobs.py": 1,
    "specscope/trace/wire/otlp_raw.py": 1,
    "specscope/trace/history/place_name.py": 1,
    "specscope/trace/history/ratios.py": 1,
    "specscope/trace/record/rules.py": 1,
    "specscope/trace/history/same.py": 1,
    "specscope/trace/record/tokens.py": 1,
    "specscope/trace/wire/unfinite.py": 1,
    "specscope/train/attend.py": 1,
    "specscope/train/eagle3.py": 1,
    "specscope/train/p_eagle.py": 1,
    "specscope/train/ttt.py": 1,
    "specscope/tui/pending.py": 1,
    "specscope/tui/program.py": 1,
    "specscope/tui/screens/compare_help.py": 1,
    "specscope/tui/screens/over.py": 1,
    "specscope/tui/signals.py": 1,
    "specscope/tui/widgets/panel.py": 1,
    "specscope/vllm/block_rule.py": 1,
    "specscope/vllm/draft_vocabulary.py": 1,
    "specscope/vllm/guard.py": 1,
    "specscope/vllm/launch.py": 1,
    "specscope/vllm/losses.py": 1,
    "specscope/vllm/philox.py": 1,
    "specscope/vllm/raw_rows.py": 1,
    "specscope/vllm/stat_logger.py": 1,
    "specscope/watch/told.py": 1,
}


def sources():
    """Every source file but __init__.py, by its name from the root."""
    files = (path for top in ("specscope", "kernels", "benchmarks") for path in (ROOT / top).rglob("*.py"))
    return {path.relative_to(ROOT).as_posix(): path for path in files if path.name != "__init__.py"}


def lines(path):
    return len(path.read_text().splitlines())


def too_long():
    return {name: lines(path) for name, path in sources().items() if lines(path) > MOST_LINES}


def crowded():
    """Files of each folder that has too many."""
    counts = Counter(str(Path(name).parent) for name in sources())
    return {folder: count for folder, count in counts.items() if count > MOST_FILES}


def names_of_several():
    """Public classes at the top of a file whose name stands in several files, with how many files."""
    names = Counter()
    for path in sources().values():
        classes = {node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.ClassDef)}
        names.update(name for name in classes if not name.startswith("_"))
    return {name: count for name, count in names.items() if count > 1}


def fragments():
    """Files that are too short for one idea: 1 each."""
    return {name: 1 for name, path in sources().items() if lines(path) < FEWEST_LINES}


if __name__ == "__main__":
    for name, found in (("CROWDED", crowded()), ("NAMES", names_of_several()), ("FRAGMENTS", fragments())):
        print(f"{name}: dict[str, int] = {dict(sorted(found.items()))}")
