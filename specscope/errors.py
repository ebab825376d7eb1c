"""The one error meant for users."""


class UserError(Exception):
    """Something the user gave cannot be used. The message is one line: what is wrong and what to do.

    The command line prints it and exits with code 2; from Python it is an ordinary exception.
    """


def first_line(error: BaseException) -> str:
    """The first line of a library's error."""
    lines = str(error).strip().splitlines()
    return lines[0][:300] if lines else type(error).__name__
