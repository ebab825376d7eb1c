"""Silences libraries that draw progress bars and write warnings on our standard error."""

from __future__ import annotations

import functools
import os

os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # read when huggingface_hub is imported


def hush(*, gguf: bool = False) -> None:
    """No bars and no warnings from transformers and huggingface_hub; failures arrive as exceptions.

    `gguf`: a .gguf file will be read, whose reader draws a bar that cannot be switched off.
    """
    from huggingface_hub.utils import logging as hub_logging
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    hub_logging.set_verbosity_error()
    if gguf:
        from transformers import modeling_gguf_pytorch_utils as reader

        if hasattr(reader, "tqdm"):
            reader.tqdm = functools.partial(reader.tqdm, disable=True)
