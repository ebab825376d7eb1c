"""What the hooks rely on in transformers: the functions that they wrap, and their parameters, in the versions known.

In another version, or where a signature differs, nothing is wrapped, and recording is refused with the reason.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

from specscope.errors import UserError
from specscope.trace.inside.hooking import Signatures, compared, live, written

UTILS = "transformers.generation.utils"
DECODING, GENERATOR, SAMPLING = "_assisted_decoding", "_get_candidate_generator", "_speculative_sampling"

_SINCE_20: Mapping[str, str] = {
    f"GenerationMixin.{DECODING}": (
        "self input_ids logits_processor stopping_criteria generation_config synced_gpus streamer inputs_tensor "
        "assistant_model assistant_tokenizer tokenizer **model_kwargs"
    ),
    f"GenerationMixin.{GENERATOR}": (
        "self generation_config input_ids inputs_tensor logits_processor model_kwargs assistant_model "
        "target_tokenizer assistant_tokenizer"
    ),
    SAMPLING: "candidate_input_ids candidate_logits candidate_length new_logits assistant_ensemble_weight",
}
VERSIONS = ("5.20", "5.21", "5.22", "5.23", "5.24")  # each with its patch releases


def _read(table: Mapping[str, str]) -> Signatures:
    return {name: tuple(parameters.split()) for name, parameters in table.items()}


KNOWN: Mapping[str, Signatures] = dict.fromkeys(VERSIONS, _read(_SINCE_20))


def minor(version: str) -> str:
    """5.23 of 5.23.0."""
    return ".".join(version.split(".")[:2])


def check_version(version: str) -> None:
    """Raises UserError where the hooks were not written for it."""
    if minor(version) not in KNOWN:
        raise UserError(
            f"transformers {version} is not known to specscope: {VERSIONS[0]} to {VERSIONS[-1]} can be recorded"
        )


def check_signatures(utils: ModuleType, version: str) -> None:
    """`utils`: transformers.generation.utils. Raises UserError that names what differs."""
    wanted = KNOWN[minor(version)]
    for line in compared(UTILS, wanted, lambda name: live(utils, name, wanted[name])):
        raise UserError(f"transformers {version} is not as it is known: {line}")


def differences_in_text(root: Path, version: str) -> list[str]:
    """What differs in its sources under `root` (its folder `transformers`), a line each: nothing is imported."""
    tree = ast.parse((root / "generation" / "utils.py").read_text(encoding="utf-8"))
    return list(compared(UTILS, KNOWN[minor(version)], lambda name: written(tree, name)))
