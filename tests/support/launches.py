"""Counts of what a step asks of a device, made without one."""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

#: Methods of a tensor for which the host waits, if the tensor is on a device.
READS = ("__bool__", "__float__", "__int__", "__index__", "cpu", "item", "numpy", "tolist")


class Launches(TorchDispatchMode):
    """Count the operations that are kernels on a device: all that are no views and no new memory. An operation on many
    tensors counts once."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, and count it."""
        name = func.overloadpacket.__name__
        returns = [each.alias_info for each in func._schema.returns]
        is_view = bool(returns) and all(alias is not None and not alias.is_write for alias in returns)
        # A number that the host reads of its own memory is no launch, and neither are marks for a profiler.
        if not is_view and not name.startswith(("empty", "new_empty", "detach", "_local_scalar", "_record_function")):
            self.found[name] += 1
        return func(*args, **(kwargs or {}))


@contextmanager
def reads_of(package: str) -> Iterator[Counter[str]]:
    """Count, by its line, what code of ``package`` reads of tensors, but of counts of steps, which the host has."""
    found: Counter[str] = Counter()

    def noting(method: Any) -> Any:
        def read(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            caller = traceback.extract_stack(limit=2)[0]
            if f"/{package}/" in caller.filename:
                found[f"{caller.filename.rsplit(f'/{package}/')[-1]}: {caller.line}"] += 1
            return method(tensor, *args, **kwargs)

        return read

    with patch.multiple(torch.Tensor, **{name: noting(getattr(torch.Tensor, name)) for name in READS}):
        yield found
