"""The dtypes of masters and states, without torch, and their sizes in bytes."""

from __future__ import annotations

from typing import Literal

#: The formats of masters.
MasterDtype = Literal["float32", "bfloat16+remainder"]

#: The formats of states with one element per element of the parameter.
StateDtype = Literal["float32", "bfloat16", "8bit"]

#: The number of masters that share one mark; see :mod:`ds_layerwise.optimizers.split_masters`.
BLOCK = 64

#: The number of elements of an 8-bit state that share one scale.
SCALED = 256

#: The bytes of one element, by torch's names of dtypes.
DTYPE_BYTES = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}


def state_bytes(numel: int, dtype: str) -> int:
    """Return the bytes of a state of ``numel`` elements."""
    if dtype == "8bit":
        return numel + 4 * -(-numel // SCALED)
    return numel * DTYPE_BYTES[dtype]


def master_bytes(numel: int, param_dtype: str, kept_as: MasterDtype) -> int:
    """Return the bytes of ``numel`` masters, a multiple of 64; 0 for float32 parameters."""
    if param_dtype == "float32":
        return 0
    if kept_as == "bfloat16+remainder" and param_dtype == "bfloat16":
        return 2 * numel + 8 * (numel // BLOCK)
    return 4 * numel
