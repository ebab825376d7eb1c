"""`specscope tune`: which tree would have been better, from a run's records and a step's cost; `tree` draws one."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

import click
import msgspec
import yaml

from specscope.analyze.tune.text import render_tuning
from specscope.analyze.tune.tuning import Recorded, recorded
from specscope.analyze.tune.tuning import tune as judge
from specscope.cli import captures as reading
from specscope.cli import options
from specscope.cli.help import verb
from specscope.cli.options import X_RULE, flag, whole_from
from specscope.cli.streams import say
from specscope.engine.config import DEFAULT_TREES
from specscope.engine.prompts import PromptSpec, read_prompts
from specscope.errors import UserError
from specscope.plans.costs import read_costs, write_costs
from specscope.plans.plan import TreePlan, describe, parse_plan, plan_dict, translated
from specscope.terminal import text_console
from specscope.trace.files import FIGURES, check_output, read_lines
from specscope.trace.record.params import SamplingParams
from specscope.trace.record.rules import BLOCK, STANDARD, is_own
from specscope.trace.record.vocabulary import printable
from specscope.trace.stored import as_runs
from specscope.tree_shape import LONGEST, MAX_NODES

# Of settings: trees, depths of a chain, and what makes TensorRT-LLM draft a chain
ADJACENCY, ONE_MODEL = "tree_adj", "eagle3_one_model"
CHOICES, DEPTHS = ("eagle_choices", "medusa_choices", ADJACENCY), ("max_draft_len", "num_speculative_tokens")
DYNAMIC = ("max_total_draft_tokens", "max_draft_len", "dynamic_tree_max_topK")  # of TensorRT-LLM
SUFFIXES = (".json", ".yaml", ".yml", ".txt")
NOTATIONS = "a notation that specscope reads: `specscope tree --help` lists them"


@verb(epilog=X_RULE)
@reading.captures_argument
@flag("--batch N", "Requests that decode at once.", whole_from(1, 1024), default=1)
@flag("--nodes MAX", "Nodes of the largest tree.", whole_from(1, 256), default=32)
@flag("--tree,asked TREE", "Also rate this tree; repeatable.", multiple=True)
@flag("--costs FILE", "File of step costs. If it exists, no model is needed; else it is written.")
@flag("--no-costs", "Compare acceptance lengths only: no model is needed.")
@flag("--check", "Measure the chosen tree. Beside the default and no drafts, on other prompts.")
@flag("--prompts FILE", "Prompts for --check.  [default: prompts that the capture lacks]")
@options.own_drafter_option
@options.target_option
@options.head_option
@options.json_option
@reading.source_options
def tune(captures: tuple[str, ...], batch: int, nodes: int, costs: str | None, **flags: Any) -> None:  # noqa: ANN401
    """Find the fastest draft tree, from a run's records.

    \b
      specscope capture prompts.jsonl -o run.jsonl --tree dynamic:32
      specscope tune run.jsonl
      specscope tune run.jsonl --tree top:2x2 --check

    A run with a large tree shows how many tokens every smaller tree would have accepted. The cost of a step is measured
    on the capture's models in a few seconds. Prints the best static and dynamic tree of every size, with tokens/s and
    intervals, and the tree to use.
    """
    reading.need_different(captures)
    asked, prompts, no_costs, check, as_json = (
        flags.pop(name) for name in ("asked", "prompts", "no_costs", "check", "as_json")
    )
    if no_costs and (costs is not None or check):
        raise UserError("--no-costs measures nothing: leave out --costs and --check")
    if prompts is not None and not check:
        raise UserError("--prompts needs --check")
    if prompts is not None and prompts != "-":
        read_prompts(prompts, PromptSpec("", SamplingParams()))  # errors in them are reported before costs are measured
    if costs is not None and not os.path.exists(costs):  # never raises, and no name is no file
        check_output(costs, "--costs", captures, FIGURES)
    wanted = {str(plan): plan for plan in map(parse_plan, asked)}
    data, warnings = _read(as_runs(captures))
    engine: Any = None
    priced = None if costs is None else read_costs(costs, data.run, batch)
    if priced is None and not no_costs and data.run.is_ours:
        engine = _engine(data, batch, flags, check=check)
        from specscope.measure.step_costs import measure_costs
        from specscope.measure.tune import work_of

        with reading.progress_bar() as progress:
            priced = measure_costs(engine, work_of(data, batch), batch, nodes, progress)
        if costs is not None:
            write_costs(costs, priced)
            say(f"wrote {costs}")
    elif priced is None and costs is not None:
        raise UserError(f"there are no costs at {costs}, and this capture's engine cannot be measured here")
    default = DEFAULT_TREES.get(data.run.drafter) if data.run.is_ours else None
    named: dict[str, TreePlan] = {"default": parse_plan(default), **wanted} if default else wanted
    tuning = judge(data, named, nodes, priced, warnings)
    if check:
        if tuning.choice is None:
            raise UserError("--check needs a chosen tree, and none was chosen: the costs are unknown")
        from specscope.measure.tune import checked

        engine = engine or _engine(data, batch, flags, check=check)
        with reading.progress_bar() as progress:
            tuning = checked(tuning, data, engine, batch, nodes, prompts, progress)
    if as_json:
        reading.answer_json("tune", tuning.to_dict(), tuning.sources, tuning.warnings)
    else:
        render_tuning(tuning, text_console())


def _read(captures: Sequence[str]) -> tuple[Recorded, list[str]]:
    readers = [reading.read_branch(path, None, "tuned") for path in captures]
    warnings = [line for reader in readers for line in reader.warnings]
    return recorded(captures, [reader.history for reader in readers]), warnings


def _engine(data: Recorded, batch: int, models: Mapping[str, str | None], *, check: bool) -> Any:  # noqa: ANN401
    from specscope.live.start import share_cores, start_engine
    from specscope.measure.judges import audit_options, engine_config_of

    share_cores()
    judged = audit_options(data.histories[0], **models, sample=None)  # reports missing models
    if judged.why_no_draft:
        raise UserError(judged.why_no_draft)
    rule = data.run.rule  # costs are of trees too; a chain's is the same under block
    rule = STANDARD if rule == BLOCK or is_own(rule) else rule
    more = {"rule": rule, "max_batch": batch, "kv_memory": max(1.0, batch / 4)}
    config = engine_config_of(data.run, models["target"], models["draft_model"], **judged.own, **more)
    if check and config.drafter == "none" != data.run.drafter:
        raise UserError(f"--check runs the drafter, and {data.run.drafter} is your own: give --drafter module:Class")
    with reading.progress_bar() as progress:
        return start_engine(config, lambda what: progress(what, 0, 0))


def _elsewhere(text: str) -> tuple[TreePlan, str]:
    """A tree of another program, and where it is from; `text`: itself, or its file. Raises UserError."""
    name = text if os.path.exists(text) or os.path.splitext(text)[1] in SUFFIXES else ""
    if name:
        text = "\n".join(line for _, line in read_lines(name, "the tree", largest=LONGEST))
    try:
        tree, about = _settings(text)
        return parse_plan(tree), about or translated(tree)[1]
    except UserError as error:
        unknown = str(error).startswith("cannot read the tree ")
        why = f" holds no tree in {NOTATIONS}" if unknown else f": {error}"
        raise UserError(f"{printable(name)}{why}" if name else str(error)) from None


def _settings(text: str) -> tuple[str, str]:
    """The tree in settings of TensorRT-LLM, SAMD or vLLM, and where it is from; else `text`. Raises UserError."""
    try:
        value = yaml.safe_load(text)  # JSON is YAML, too
    except (yaml.YAMLError, ValueError, RecursionError):
        value = None
    if call := re.search(r"((?:eagle|medusa)_choices) *= *(\[\s*\[[\[\]\d,\s]*\])", text):  # in Python
        value = {call[1]: call[2]}
    parts = [value, *value.values()] if isinstance(value, dict) else []
    part = next((part for part in parts if isinstance(part, dict) and part.keys() & {*CHOICES, *DEPTHS}), {})
    if len(trees := [key for key in CHOICES if part.get(key)]) > 1:
        raise UserError(f"there are two trees, {' and '.join(trees)}: leave one")
    if part.get("use_dynamic_tree"):
        if missing := next((key for key in DYNAMIC if part.get(key) is None), None):
            raise UserError(f"TensorRT-LLM's dynamic tree needs {missing}")
        return "dynamic:{},depth={},top={}".format(*map(part.get, DYNAMIC)), "TensorRT-LLM's use_dynamic_tree"
    if (depth := part.get(DEPTHS[0])) is not None and (part.get(ONE_MODEL) or not trees):
        return str(depth), f"TensorRT-LLM's {DEPTHS[0]}, a chain{f': it has {ONE_MODEL}' * bool(part.get(ONE_MODEL))}"
    if trees == [ADJACENCY]:
        return _adjacent(part[ADJACENCY]), f"SAMD's {ADJACENCY}"
    if trees:
        return str(part[trees[0]]), f"TensorRT-LLM's {trees[0]}"
    return (json.dumps(part, default=str) if part else re.sub(r"\A\s*\w+ *= *(?=\[)", "", text)), ""


def _adjacent(children: object) -> str:
    """A tree in SAMD's notation, each node's children, as paths. Raises UserError."""
    try:
        known = msgspec.convert(children, dict[int, list[int]], strict=False)
    except msgspec.ValidationError:
        raise UserError("cannot read the tree_adj: write each node's children, {'0': [1, 2], '1': [3]}") from None
    queue: list[tuple[int, tuple[int, ...]]] = [(0, ())]
    for node, path in queue:  # which grows meanwhile
        queue += [(child, (*path, rank)) for rank, child in enumerate(known.get(node, ()))]
        if len(queue) > MAX_NODES + 1:
            raise UserError(f"the tree_adj has a cycle, or more than {MAX_NODES} nodes")
    if lost := known.keys() - {node for node, _ in queue}:
        raise UserError(f"node {min(lost)} of the tree_adj has no parent")
    return str([path for _, path in queue[1:]])


@verb()
@click.argument("tree", metavar="TREE", required=False)
@flag("--from,other TEXT", "A tree in another program's notation: a file or text.")
@click.option("--mask/--no-mask", default=True, help="Also draw the attention mask.")
@options.json_option
def tree(tree: str | None, other: str | None, *, mask: bool, as_json: bool) -> None:
    """Draw a draft tree, its attention mask and its cost.

    \b
      specscope tree 3x4
      specscope tree --from '{"method": "eagle3", "num_speculative_tokens": 5}'
      specscope tree --from trtllm.yaml

    TREE is written as for --tree:

    \b
      5                           a chain of five
      3x4                         three chains of four
      '[(0,), (1,), (0, 0)]'      any static tree, as paths of child ranks
      sampled:3x4, top:3x4        the same shape: drawn if the request is sampled; always the likeliest tokens
      dynamic:24,depth=6,top=4    EAGLE-2: the best 24 nodes of a search 6 deep and 4 wide

    The tokens of a static tree are sampled if the request is sampled, and are the likeliest ones if it is greedy.

    --from and --tree also read the trees of other programs:

    \b
      '[[0], [1], [0, 0]]'        choices of EAGLE, Medusa and TensorRT-LLM
      '{"method": "eagle3", ...}' vLLM's --speculative-config, also with a command line around it
      3,4,16                      SGLang's steps, top k and draft tokens, or the flags that set them

    --from also takes a file that holds one of these, or TensorRT-LLM's settings or SAMD's tree_adj, in YAML or JSON.
    """
    if (tree is None) == (other is None):
        raise UserError("give a TREE, or another program's tree with --from TEXT")
    plan, about = (parse_plan(tree), translated(tree)[1]) if tree is not None else _elsewhere(other or "")
    if as_json:
        reading.answer_json("tree", plan_dict(plan, about), ())
    else:
        click.echo(describe(plan, mask=mask, about=about if about or other is not None else None))
