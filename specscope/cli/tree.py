"""`specscope tree`: a draft tree, its attention mask and its cost."""

from __future__ import annotations

import os
import re

import click

from specscope.cli.captures import print_json
from specscope.cli.help import verb
from specscope.cli.options import flag, json_option
from specscope.envelope import envelope
from specscope.errors import UserError
from specscope.plans.plan import LONGEST, describe, parse_plan, plan_dict, translated
from specscope.trace.checked import decoded
from specscope.trace.files import read_lines
from specscope.tree_shape import MAX_NODES


def _tree_elsewhere(text: str) -> tuple[str, str]:
    """A tree of another program, or of a file of its: as text, and where it is from. Raises UserError."""
    if os.path.isfile(text):
        text = "\n".join(line for _, line in read_lines(text, "the tree", largest=LONGEST))
    if choices := re.search(r"((?:eagle|medusa)_choices)\W{1,4}(\[\s*\[[\[\]\d,\s]*\])", text):
        return choices[2], f"TensorRT-LLM's {choices[1]}"
    if '"tree_adj"' not in text:
        return text, ""
    try:
        children = decoded(text, dict[str, dict[str, list[int]]])["tree_adj"]
    except (ValueError, KeyError):
        raise UserError("cannot read the tree_adj: write each node's children, {'0': [1, 2], '1': [3]}") from None
    queue: list[tuple[int, tuple[int, ...]]] = [(0, ())]
    for node, path in queue:  # which grows meanwhile
        queue += [(child, (*path, rank)) for rank, child in enumerate(children.get(str(node), ()))]
        if len(queue) > MAX_NODES + 1:
            raise UserError(f"the tree_adj has a cycle, or more than {MAX_NODES} nodes")
    return str([path for _, path in queue[1:]]), "SAMD's tree_adj"


@verb()
@click.argument("tree", metavar="TREE", required=False)
@flag("--from,other TEXT", "A tree in another program's notation: a file or text.")
@click.option("--mask/--no-mask", default=True, help="Also draw the attention mask.")
@json_option
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

    --from also takes a file that holds one of these, TensorRT-LLM's eagle_choices, medusa_choices, or SAMD's tree_adj.
    """
    if (tree is None) == (other is None):
        raise UserError("give a TREE, or another program's tree with --from TEXT")
    text, about = (tree, "") if tree is not None else _tree_elsewhere(other or "")
    plan, about = parse_plan(text), about or translated(text)[1]
    if as_json:
        print_json(envelope("tree", plan_dict(plan, about), source=[]))
    else:
        click.echo(describe(plan, mask=mask, about=about if about or other is not None else None))
