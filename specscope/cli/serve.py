"""`specscope serve`: an OpenAI-compatible server over an engine in this process, its sinks, and a screen beside it."""

from __future__ import annotations

import asyncio
import gc
import os
import sys
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

import click

from specscope.cli.help import verb
from specscope.cli.options import (
    engine_config,
    engine_options,
    flag,
    output_options,
    output_settings,
    real_from,
    refuse_others,
    whole_from,
)
from specscope.cli.streams import say, warn
from specscope.engine.config import EngineConfig
from specscope.errors import UserError
from specscope.interrupt import ends_at_once
from specscope.lifetime import Lifetime
from specscope.remote.debug_socket import check_socket
from specscope.trace.files import read_lines
from specscope.trace.inside import settings
from specscope.trace.wire.outputs import OutputOptions, Outputs

if TYPE_CHECKING:
    from specscope.serve.service import ServeOptions

CONNECTIONS = 1024  # in addition to those of waiting requests
KEY = "SPECSCOPE_API_KEY"
LARGEST_KEY = 2**16  # bytes of a file that holds one
GRACE_SECONDS = 30.0  # of a server beside a screen, beyond --shutdown-timeout: for imports and what it saves
SHUTDOWN_SECONDS = 2.0  # with what follows (serve/server.py) a server stops within 5 s


@verb()
@flag("--host HOST", "Address to serve on.", default="127.0.0.1")
@flag("--port PORT", "0 takes any free one.", whole_from(0, 65535), default=8000)
@flag(
    "--api-key KEY",
    f"Key that clients must send. Required if --host lets other machines connect; safer in {KEY} or a file.",
    envvar=KEY,
)
@flag("--api-key-file FILE", "Read the key from the only line of this file; - is standard input.", usual=False)
@flag("--served-model-name,name NAME", "Model name for clients.  [default: the target's name]")
@flag(
    "--max-queue N",
    "Requests that may wait. More, beyond --max-batch that run, get status 429.",
    whole_from(0, 100_000),
    default=256,
)
@flag("--max-body MIB", "Largest request body.", real_from(0.001, 1024), default=4.0, usual=False)
@flag(
    "--shutdown-timeout,shutdown_seconds SECONDS",
    "On Ctrl-C or SIGTERM, wait this long for requests to finish. A second signal stops at once.",
    real_from(0, 86_400),
    default=SHUTDOWN_SECONDS,
    usual=False,
)
@flag("--seed N", "Base seed for requests that give none.", whole_from(0, 2**63 - 1), default=0)
@flag(
    "-o,--output FILE",
    "Capture the run to this file. If it exists, the capture gets another name: run.2.jsonl for run.jsonl.",
)
@flag("--debug-socket SOCKET", "Unix socket for specscope debug SOCKET.")
@flag("--screen", "Show the run live in this terminal. The server's messages go to a file.")
@engine_options
@output_options
@click.pass_obj
def serve(lifetime: Lifetime, /, output: str | None, *, screen: bool, **flags: Any) -> None:  # noqa: ANN401
    """Serve a model through an OpenAI-compatible API, with speculative decoding.

    /v1/completions and /v1/chat/completions accept OpenAI's and vLLM's fields, with or without streaming. /metrics,
    /health, /v1/models and /version are there too. Only this machine can connect unless you give --host and --api-key.
    Ctrl-C waits for requests to finish.

    \b
      specscope serve --drafter suffix -o run.jsonl
      curl http://127.0.0.1:8000/v1/completions -H 'content-type: application/json' -d '{"prompt": "Once upon"}'
    """
    # A missing extra is reported before a model is loaded
    import starlette  # noqa: F401
    import uvicorn  # noqa: F401

    if screen:
        sys.exit(_beside_screen(lifetime, flags["shutdown_seconds"] + GRACE_SECONDS))
    config = engine_config(flags)
    outputs = replace(output_settings(flags, output, unattended=True), model=flags["name"])
    options = replace(_options(flags), privacy=outputs.privacy, ratio=outputs.ratio)
    sys.exit(_serve(config, options, outputs, lifetime))


def _beside_screen(lifetime: Lifetime, grace: float) -> int:
    """The server in a process of its own, and the screen that listens to its spans. Raises UserError."""
    from specscope.cli.inside import run_with_screen

    refuse_others("--screen", "receives the spans itself", refused={"otlp_endpoint", "otlp_protocol"})
    command = [sys.executable, "-P", "-m", "specscope", *(word for word in sys.argv[1:] if word != "--screen")]
    names = {"name": "specscope serve", "instead": "specscope serve without --screen"}
    return run_with_screen(command, os.environ | {settings.PROTOCOL: "grpc"}, lifetime, grace=grace, **names)


def _options(flags: dict[str, Any]) -> ServeOptions:
    from specscope.remote.http import Limits
    from specscope.serve.service import ServeOptions

    key = _api_key(flags.pop("api_key"), flags.pop("api_key_file"))
    limits = Limits(int(flags.pop("max_body") * 2**20), connections=CONNECTIONS + flags["max_queue"])
    own = {field.name: flags.pop(field.name) for field in fields(ServeOptions) if field.name in flags}
    if own["debug_socket"] is not None:
        check_socket(own["debug_socket"], "--debug-socket")
    return ServeOptions(**own, api_key=key, limits=limits)


def _api_key(given: str | None, file: str | None) -> str | None:
    """The key, as given or from a file. Raises UserError, which does not show the key."""
    name = "--api-key" if file is None else f"--api-key-file {file}"
    if file is not None and given is not None:
        raise UserError(f"give one of --api-key-file and --api-key (or {KEY})")
    if file is not None:
        lines = [line for _, line in read_lines(file, "the API key", largest=LARGEST_KEY) if line]
        if len(lines) > 1:
            raise UserError(f"{name}: the file must hold the key alone, on one line")
        given = "".join(lines)
    if given == "":
        raise UserError(f"{name} is empty: give a key, or leave it out")
    if given is not None and not (given.isascii() and given.isprintable()):
        raise UserError(f"{name} must be printable ASCII characters: it is sent in an HTTP header")
    return given


def _serve(config: EngineConfig, options: ServeOptions, sinks: OutputOptions, lifetime: Lifetime) -> int:
    """Load, serve, end. The exit code: 0 after Ctrl-C or SIGTERM let it end, as a server's; 1 where the capture lacks
    something. Raises UserError.
    """
    from specscope.live.start import on_passing_thread, start_engine
    from specscope.remote.http import address
    from specscope.serve.server import Serving, bind

    bound = bind(options)
    host, port = bound.getsockname()[:2]
    with ends_at_once():
        engine = on_passing_thread(lambda: start_engine(config, lambda stage: say(f"specscope: {stage} ...")))
    outputs = Outputs(sinks, engine.bus, engine.run_info, engine.vocabulary, None, tell=warn)
    if outputs.renamed:
        say(f"specscope: {outputs.renamed}")
    lifetime.leave = outputs.close  # where requests take longer than the grace
    gc.freeze()  # what was loaded stays: the collector need not walk it while it serves

    serving, name = Serving(engine, options, bound), options.name or engine.run_info.target
    try:
        asyncio.run(
            serving.run(lambda: say(f"specscope: serving {name} on http://{address(host, port)} (Ctrl-C to stop)"))
        )
    except UserError:
        raise
    except Exception as error:
        if os.environ.get("SPECSCOPE_TRACEBACK"):
            raise
        raise UserError(f"the engine failed: {type(error).__name__}: {error}") from error
    finally:
        warn(*outputs.close())
    return outputs.code
