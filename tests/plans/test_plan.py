"""The --tree grammar, the table of drafters, and what steps cost: between, below and beyond what was measured."""

import dataclasses
import itertools

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specscope.errors import UserError
from specscope.plans.costs import CostPoint, Costs, about_run, at, read_costs, write_costs
from specscope.plans.kinds import KINDS, drafter_named, model_part, runs_head, text_part
from specscope.plans.plan import (
    DEFAULT_DEPTH,
    DEFAULT_TOP,
    MAX_DEPTH,
    MAX_TOP,
    DynamicPlan,
    StaticPlan,
    describe,
    parse_plan,
)
from specscope.trace.record.tree import ROOT
from specscope.tree_shape import MAX_NODES, TreeShape, parse_tree
from tests.analyze.histories import RUN
from tests.trace.record.test_tree import shapes

statics = st.builds(StaticPlan, shapes().map(lambda paths: parse_tree(str(paths))), st.booleans())
dynamics = st.builds(DynamicPlan, st.integers(1, MAX_NODES), st.integers(1, MAX_DEPTH), st.integers(1, MAX_TOP)).filter(
    lambda plan: plan.depth <= plan.nodes
)


@given(statics | dynamics)
def test_plans_round_trip_through_their_strings(plan):
    assert parse_plan(str(plan)) == plan
    assert parse_plan(f"  {plan}\n") == plan


def test_short_forms():
    assert parse_plan("sampled:3x4") == parse_plan("3x4") == StaticPlan(TreeShape.fan(3, 4))
    assert str(parse_plan("sampled:3x4")) == "3x4"
    assert str(parse_plan("top:5")) == "top:5"
    assert parse_plan("top:3x4") == StaticPlan(TreeShape.fan(3, 4), top=True) != parse_plan("3x4")
    assert parse_plan("dynamic:24") == DynamicPlan(24, DEFAULT_DEPTH, DEFAULT_TOP)
    assert parse_plan("dynamic:24,top=2") == DynamicPlan(24, DEFAULT_DEPTH, 2)
    assert parse_plan("dynamic:24, depth=6, top=3") == DynamicPlan(24, 6, 3)
    # Where the default depth is more than there are nodes, it is as deep as it can be.
    assert parse_plan("dynamic:3") == DynamicPlan(3, 3, DEFAULT_TOP)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "cannot read the tree ''"),
        ("dynamic", "cannot read the tree 'dynamic'"),
        ("eagle:24", r"cannot read the tree 'eagle:24': write 5 .* top:3x5, sampled:3x5 or dynamic:24"),
        ("Top:5", "top:3x5, sampled:3x5 or dynamic:24"),
        ("top:", "cannot read the tree ''"),
        ("top:0", "no nodes"),
        ("top:top:3", "cannot read the tree 'top:3'"),
        (f"sampled:{MAX_NODES + 1}", "the limit is 256"),
        ("dynamic:", "write dynamic:NODES,depth=D,top=K"),
        ("dynamic:24,top=4,depth=6", "write dynamic:NODES,depth=D,top=K"),
        ("dynamic:24,width=4", "write dynamic:NODES,depth=D,top=K"),
        ("dynamic:0", "nodes must be between 1 and 256, not 0"),
        (f"dynamic:{MAX_NODES + 1}", "nodes must be between 1 and 256, not 257"),
        ("dynamic:24,depth=0", "depth must be between 1 and 32, not 0"),
        (f"dynamic:200,depth={MAX_DEPTH + 1}", "depth must be between 1 and 32, not 33"),
        ("dynamic:24,top=0", "top must be between 1 and 32, not 0"),
        (f"dynamic:24,top={MAX_TOP + 1}", "top must be between 1 and 32, not 33"),
        ("dynamic:4,depth=5", "4 nodes cannot be 5 deep"),
    ],
)
def test_bad_plans_are_refused_clearly(text, message):
    with pytest.raises(UserError, match=message) as error:
        parse_plan(text)
    assert "\n" not in str(error.value)


@given(statics)
def test_costs_of_a_static_tree(plan):
    paths = [[node] for node in range(len(plan.shape))]
    for path in paths:
        while (above := plan.shape.parent[path[-1]]) != ROOT:
            path.append(above)
    assert (plan.max_nodes, plan.max_depth) == (len(paths), max(map(len, paths)))
    inner = {node for path in paths for node in path[1:]}
    depths = [len(paths[node]) for node in inner]
    assert plan.fed == [depths.count(depth) for depth in range(1, max(depths, default=0) + 1)]


@given(st.integers(1, 60), st.integers(1, 5), st.integers(1, 4))
def test_costs_of_a_dynamic_tree(nodes, depth, top):
    """By running the search without scores: every level gives `top` children to `top` nodes, the root's aside."""
    plan = DynamicPlan(nodes, depth, top)
    seen, fed, beam = 0, 0, [ROOT]
    for level in range(depth):
        fed += len(beam) if level else 0
        found = [(above, rank) for above in beam for rank in range(top)]
        seen += len(found)
        beam = found[:top]
    assert (plan.candidates, sum(plan.fed), plan.max_depth) == (seen, fed, depth)
    assert plan.max_nodes == min(nodes, seen)


VLLM = '{"method": "eagle3", "model": "h", "num_speculative_tokens": 5}'
WITH_TREE = '{"method": "eagle", "num_speculative_tokens": 3, "speculative_token_tree": "[(0,), (1,), (0, 0)]"}'
FLAGS = "--speculative-num-steps 3 --speculative-eagle-topk 4 --speculative-num-draft-tokens 16"


@pytest.mark.parametrize(
    ("text", "ours"),
    [
        ("[[0], [1], [0, 0]]", "[(0,), (1,), (0, 0)]"),
        ("[[0, 0], [0], [0, 0, 0]]", "3"),
        (VLLM, "5"),
        (f"vllm serve m --speculative-config '{VLLM}' --override-generation-config '{{}}'", "5"),
        (f"--speculative-config={VLLM}", "5"),
        (WITH_TREE, "[(0,), (1,), (0, 0)]"),
        ("3,4,16", "dynamic:15,depth=3,top=4"),
        (" 3 4 16\n", "dynamic:15,depth=3,top=4"),
        (f"python -m sglang.launch_server {FLAGS} --port 1", "dynamic:15,depth=3,top=4"),
        (FLAGS.replace(" --", "\n").replace("-", "_").replace(" ", "="), "dynamic:15,depth=3,top=4"),
        ('{"speculative_num_steps": 3, "speculative_eagle_topk": 1, "speculative_num_draft_tokens": 4}', "top:3"),
    ],
)
def test_trees_of_other_programs(text, ours):
    assert str(parse_plan(text)) == ours


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("3,4", "cannot read the tree '3,4'"),
        ("3,4,1", "draft tokens must be 2 or more, not 1"),
        ("5,2,4", "3 nodes cannot be 5 deep"),
        ("--speculative-num-steps 3", "speculative_eagle_topk is missing"),
        ('{"method": "suffix"}', "says neither num_speculative_tokens nor speculative_token_tree"),
        ('{"num_speculative_tokens": "five"}', "cannot read the tree of the configuration"),
        ('{"num_speculative_tokens": 5', "cannot read the tree of the configuration"),
        ('{"speculative_token_tree": "x"}', "cannot read the tree 'x'"),
        ('{"num_speculative_tokens": 300}', "has 300 nodes; the limit is 256"),
        ("[[0], [0, 1]]", r"\(0, 1\) has no earlier sibling"),
        ("[[0], 1]", "cannot read the tree"),
    ],
)
def test_trees_of_other_programs_that_are_refused(text, message):
    with pytest.raises(UserError, match=message):
        parse_plan(text)


DESCRIBED = """tree [(0,), (1,), (0, 0)]
from        x
here        --tree '[(0,), (1,), (0, 0)]'

●  root: the last committed token
├─ 0  0
│  └─ 2  0,0
└─ 1  1

nodes       3, 2 of them leaves
depth       2: at most 3 tokens per step, with the final token
verify      4 rows per request (root and nodes), 4 slots of the target's KV cache
draft       2 passes, 2 rows, if the drafter is a model
rule        sampled without replacement if the request is sampled, top tokens if it is greedy

mask        a row may attend to the context, the root and the nodes marked ■
   0        ■ · ·
   1        · ■ ·
   2        ■ · ■"""


def test_what_a_tree_is_and_costs_is_told():
    assert describe(parse_plan("[(0,), (1,), (0, 0)]"), mask=True, about="x") == DESCRIBED
    assert "mask        not drawn for 256 nodes" in describe(parse_plan("top:8x32"), mask=True)
    said = describe(parse_plan("dynamic:24"), mask=True).splitlines()
    assert said[3] == "            5 deep; of 68 candidates the 24 best are kept"
    assert said[-2:] == [
        "draft       5 passes, 17 rows, if the drafter is a model",
        "rule        top tokens, deterministic: accepted with p",
    ]


@pytest.mark.parametrize(
    ("drafter", "text", "model", "head"),
    [
        ("eagle", "", "eagle", True),
        ("draft_model", "", "draft_model", False),
        ("suffix+eagle", "suffix", "eagle", True),
        ("ngram+draft_model", "ngram", "draft_model", False),
        ("suffix", "suffix", "", False),
        ("medusa", "", "", False),  # known, and not run here
        ("synthetic:0.8", "", "", False),
        ("none", "", "", False),
        ("my:Drafter", "", "", False),
    ],
)
def test_parts(drafter, text, model, head):
    assert (text_part(drafter), model_part(drafter), runs_head(drafter)) == (text, model, head)


@pytest.mark.parametrize(
    ("method", "name"),
    [("eagle3", "eagle"), ("EAGLE3", "eagle"), ("STANDALONE", "draft_model"), ("ngram_gpu", "ngram"), ("ours", "ours")],
)
def test_names_of_other_engines(method, name):
    assert drafter_named(method) == name


def test_no_name_stands_twice():
    names = [name for kind in KINDS for name in (kind.name, *kind.also)]
    assert len(names) == len(set(names))


def point(rows, seconds):
    return CostPoint(rows, seconds, seconds * 0.98, seconds * 1.02)


def curve(*points):
    return tuple(itertools.starmap(point, points))


STEPS = curve((2, 0.010), (4, 0.020), (8, 0.024), (16, 0.040))
OF_RUN = Costs({**about_run(RUN), "cpu": "one"}, STEPS, curve((2, 0.003)), curve((2, 0.002), (8, 0.005)))


@pytest.mark.parametrize(
    ("rows", "seconds"), [(1, 0.010), (4, 0.020), (6, 0.022), (12, 0.032), (16, 0.040), (20, 0.048)]
)
def test_between_points_and_beyond_them_it_is_a_line(rows, seconds):
    assert at(STEPS, rows) == pytest.approx(seconds)


def test_a_file_is_read_as_it_was_written(tmp_path):
    file = str(tmp_path / "costs")
    write_costs(file, OF_RUN)
    assert read_costs(file, RUN, 2) == OF_RUN
    assert read_costs(str(tmp_path / "none"), RUN, 2) is None
    write_costs(file, dataclasses.replace(OF_RUN, about={}))  # what was made up need not name its engine
    assert read_costs(file, RUN, 2).step == STEPS


@pytest.mark.parametrize(
    ("about", "batch", "said"),
    [
        ({"target": "other"}, 2, "the costs of target other, and the capture's is SmolLM2-135M-Instruct"),
        ({"drafter": "eagle"}, 2, "of drafter eagle"),
        ({"dtype": "float32"}, 2, "of dtype float32"),
        ({}, 8, "costs at batch 2: give --batch 2"),
    ],
)
def test_those_of_another_engine_are_refused(about, batch, said, tmp_path):
    write_costs(str(tmp_path / "costs"), dataclasses.replace(OF_RUN, about={**OF_RUN.about, **about}))
    with pytest.raises(UserError, match=said):
        read_costs(str(tmp_path / "costs"), RUN, batch)


HOLDS_NONE = "holds no costs: name a file that --costs wrote, or a new file"


@pytest.mark.parametrize(
    "changed",
    [
        {"step": ()},
        {"step": curve((1, 0.0), (2, 0.1))},
        {"step": curve((2, 0.1), (1, 0.1))},
        {"step": curve((4, 0.1), (4, 0.2))},
        {"step": curve((4, 0.1), (40, 0.2), (8, 0.2))},
        {"step": curve((1, 0.1), (10**12, 0.2))},
        {"step": curve((4, -0.1))},
        {"passes": curve((4, 0.1), (4, 0.1))},
        {"first": curve((1, -1.0))},
        {"kind": "something else"},
        {"step": 3},
        {"about": 3},
    ],
)
def test_what_cannot_be_costs_is_refused(tmp_path, changed):
    (tmp_path / "c").write_bytes(msgspec.json.encode(dataclasses.asdict(OF_RUN) | changed))
    with pytest.raises(UserError, match=HOLDS_NONE):
        read_costs(str(tmp_path / "c"), RUN, 2)
