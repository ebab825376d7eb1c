"""The command line."""

import sys

if sys.platform == "win32":
    sys.exit("specscope: error: specscope runs on Linux; on Windows, use WSL")
