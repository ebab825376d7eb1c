"""Chat templates, rendered within limits of time and memory: a model's template is a program that others wrote."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from types import SimpleNamespace
from typing import Any

from specscope.errors import UserError
from specscope.speculate.bounded import BoundedProcess, EndedError, answer_jobs

SECONDS = 5  # of processor time, for one conversation
MEMORY = 2**30  # bytes
LIMITS = f"takes more than {SECONDS} s or {MEMORY >> 30} GiB"
_PROCESS = BoundedProcess("specscope.engine.chat_template")


def start(tokenizer: Any) -> None:  # noqa: ANN401
    """Start the process ahead, where there is a template for it."""
    if tokenizer.chat_template:
        _PROCESS.start()


def render(tokenizer: Any, messages: Any, variables: Mapping[str, Any], most: int) -> str:  # noqa: ANN401
    """A conversation as text, up to where the model answers. Raises UserError, also for over `most` characters."""
    about = (tokenizer.chat_template, dict(tokenizer.special_tokens_map))
    text, why, job = "", LIMITS, ([dict(message) for message in messages], dict(variables), most)
    with suppress(EndedError):
        text, why = _PROCESS.ask(repr(about), about, job)
    if why:
        raise UserError(f"the chat template {why}")
    return str(text)


def _answer(apply: Callable[..., Any], job: tuple[Any, dict[str, Any], int]) -> tuple[str, str]:
    """(The text, "") or ("", why there is none): only as much as is wanted leaves the process."""
    messages, variables, most = job
    try:
        text = str(apply(messages, add_generation_prompt=True, tokenize=False, **variables))
    except MemoryError:
        return "", LIMITS
    except Exception as error:
        return "", f"rejects these messages: {error}"
    too_long = f"makes {len(text)} characters of the messages; the limit is {most}"
    return (text, "") if len(text) <= most else ("", too_long)


def _load() -> Callable[[Any], Callable[[Any], tuple[str, str]]]:
    from transformers.tokenization_utils_base import PreTrainedTokenizerBase as Base

    def prepare(about: tuple[Any, dict[str, str]]) -> Callable[[Any], tuple[str, str]]:
        stand: Any = SimpleNamespace(chat_template=about[0], special_tokens_map=about[1])  # all that is asked of it
        stand.get_chat_template = partial(Base.get_chat_template, stand)
        return partial(_answer, partial(Base.apply_chat_template, stand))

    return prepare


if __name__ == "__main__":
    answer_jobs(_load, SECONDS, MEMORY)
