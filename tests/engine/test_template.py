"""chat_template_kwargs: variables of the chat template reach it, and are recorded with the request."""

import json

import pytest

from specscope import Engine
from specscope.engine.prompts import PromptSpec, read_template
from specscope.errors import UserError
from specscope.trace.record.params import SamplingParams

PARAMS = SamplingParams(max_tokens=2)
OFF = {"enable_thinking": False}


@pytest.fixture(scope="module")
def engine(tiny):
    return Engine(target=str(tiny), dtype="float32", kv_memory=0.01, drafter="none", threads=1)


def test_they_change_the_prompt_and_are_a_label(engine):
    for template in (OFF, {"enable_thinking": True}, {}):
        engine.add_spec(PromptSpec("a", PARAMS, {"kind": "x"}, template=template))
    infos = []
    while engine.busy:
        infos += engine.step().admitted
    assert [info.prompt for info in infos] == ["<|user|>a<|a|><|-|>", "<|user|>a<|a|>", "<|user|>a<|a|>"]
    told = [{"chat_template_kwargs": json.dumps(OFF)}, {"chat_template_kwargs": '{"enable_thinking": true}'}, {}]
    assert [info.labels for info in infos] == [{"kind": "x"} | label for label in told]


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        (PromptSpec("a", PARAMS, raw=True, template=OFF), "apply to chats: the prompt is plain"),
        (PromptSpec("a", PARAMS, template={"tokenize": True}), "'tokenize' is not a variable of a chat template"),
        (PromptSpec("a", PARAMS, template={"chat_template": "{{ x }}"}), "'chat_template' is not a variable"),
        (PromptSpec("a", PARAMS, template={"x": "y" * 20_000}), "at most 10000 characters"),
    ],
)
def test_what_cannot_be_a_variable_is_refused(engine, spec, why):
    with pytest.raises(UserError, match=f"chat_template_kwargs.*{why}"):
        engine.add_spec(spec)
    assert not engine.busy


def test_a_flag_that_is_no_object_is_refused():
    for text in ("", "[]", '{"a": NaN}', "{" * 9000, json.dumps({"a": "x" * 20_000})):
        with pytest.raises(UserError, match=r"^(--chat-template-kwargs|chat_template_kwargs) [^\n]*$"):
            read_template(text)
