"""Where the installed program begins: until its modules are there, Ctrl-C ends it without a traceback."""

import signal


def entry() -> None:
    """The program."""
    on_ctrl_c = signal.getsignal(signal.SIGINT)
    if on_ctrl_c is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from specscope.__main__ import entry as run

    signal.signal(signal.SIGINT, on_ctrl_c)
    run()
