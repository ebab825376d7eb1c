"""How much work a call is, in lines of Python: the same on every machine, however busy it is."""

import sys


def lines_run(call, *args):
    """How many lines of Python a call runs, and what it gives."""
    count = 0

    def look(frame, event, arg):
        nonlocal count
        count += event == "line"
        return look

    before = sys.gettrace()
    sys.settrace(look)
    try:
        made = call(*args)
    finally:
        sys.settrace(before)
    return count, made
