"""Names on the Hugging Face hub, also on a machine without a network."""

from __future__ import annotations

import functools
import os
import threading
import time
from typing import Any

from specscope.errors import UserError, first_line

LIMIT = 4.0  # seconds to wait for the hub


def hub_arguments(name: str) -> dict[str, Any]:
    """What from_pretrained takes besides a hub name. Raises UserError where the hub cannot be reached.

    Without a network the cache is used. The library would retry each file six times, for a minute.
    """
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        cached = isinstance(try_to_load_from_cache(name, "config.json"), str)
    except HFValidationError as error:
        raise UserError(f"cannot load {name}: {first_line(error)}") from None
    missing = f"cannot load {name}: it is not a folder, is not in the cache, and"
    if constants.is_offline_mode():
        if not cached:
            raise UserError(f"{missing} HF_HUB_OFFLINE is set")
        return {}  # the library uses the cache alone
    problem = _unreachable(constants.ENDPOINT, int(time.monotonic() // 60))
    if problem is not None:
        if not cached:
            raise UserError(f"{missing} {constants.ENDPOINT} cannot be reached ({problem})")
        return {"local_files_only": True}
    if not cached:
        try:
            get_hf_file_metadata(hf_hub_url(name, "config.json"), timeout=LIMIT)
        except HfHubHTTPError as error:
            if error.response is not None and error.response.status_code in (401, 403, 404):
                raise UserError(f"cannot load {name}: {first_line(error)}") from None
    return {}


@functools.cache
def _unreachable(endpoint: str, minute: int) -> str | None:
    """Why the hub does not answer; None where it does, whatever it says. Asked once a minute.

    In a thread of its own: looking up a name can hang for longer than any limit that a request takes.
    """
    from huggingface_hub import get_session

    why: list[str | None] = []

    def ask() -> None:
        try:
            get_session().head(endpoint, timeout=LIMIT)
            why.append(None)
        except Exception as error:
            why.append(first_line(error))

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(LIMIT)
    return why[0] if why else f"no answer in {LIMIT:.0f} s"


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
