"""A template that would take all memory or all time is refused, and the next conversation is rendered."""

import pytest
from transformers import PreTrainedTokenizerBase

from specscope.engine import chat_template
from specscope.errors import UserError

HELLO = [{"role": "user", "content": "Hello"}]


def plain(template, **tokens):
    """A tokenizer as far as transformers' own templates go."""
    methods = {"apply_chat_template": PreTrainedTokenizerBase.apply_chat_template}
    return type("Plain", (), methods | {"chat_template": template, "special_tokens_map": tokens})()


DOUBLED = (
    "{% set ns = namespace(s='xxxxxxxx') %}{% for i in range(60) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}{{ ns.s }}"
)
LOOPS = "{% for i in range(99999) %}{% for j in range(99999) %}{{ 1 }}{% endfor %}{% endfor %}"


@pytest.mark.parametrize("template", ["{{ 'x' * 10**10 }}", "{{ '%9999999999d' % 1 }}", DOUBLED, LOOPS])
def test_a_template_without_end_is_refused(template):
    with pytest.raises(UserError, match=r"^the chat template takes more than 5 s or 1 GiB$"):
        chat_template.render(plain(template), HELLO, {}, 1000)
    good = plain("{{ bos_token }}{{ messages[0].content }}{{ x }}", bos_token="<s>")
    assert chat_template.render(good, HELLO, {"x": 3}, 1000) == "<s>Hello3"


def test_what_it_makes_is_bounded_and_what_it_refuses_is_said():
    with pytest.raises(UserError, match="makes 5000 characters of the messages; the limit is 1000"):
        chat_template.render(plain("{{ messages[0].content * 1000 }}"), HELLO, {}, 1000)
    with pytest.raises(UserError, match=r"^the chat template rejects these messages: no user$"):
        chat_template.render(plain("{{ raise_exception('no user') }}"), HELLO, {}, 1000)
