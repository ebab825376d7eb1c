"""The one error that people are meant to see."""


class UserError(Exception):
    """Something the user gave cannot be used. The message is one line: what is wrong and what to do.

    The command line prints it and exits with code 2; from Python it is an ordinary exception.
    """
