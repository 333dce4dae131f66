"""DeepSpeed's universal format: one folder per parameter, one file per state, whole and independent
of the world size.

Note: states under another name
    DeepSpeed's own optimizers read ``fp32``, ``exp_avg``, ``exp_avg_sq`` and ``step`` of every
    parameter, and fail on a group in which one parameter has a state that another lacks. So here,
    too, a first moment is ``exp_avg.pt``, and a missing second one is zeros that take one element
    on disk. ``zero/optimizer_state.pt`` has, under the key of this package, the real states of each
    parameter. States that do not fit these four names are in a sub-folder, which DeepSpeed ignores.
"""

from __future__ import annotations

import math
import os
import re
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from deepspeed.checkpoint.constants import (
    BASE_OPTIMIZER_STATE,
    CAT_DIM,
    OPTIMIZER_STATE_DICT,
    PARAM,
    PARAM_GROUPS,
    PARAM_N_SUB_PARAMS,
    PARAM_SLICE_MAPPINGS,
    SINGLE_PARTITION_OF_FP32_GROUPS,
    TP_REPLICATED_PARAMETER_PATTERNS,
    UNIVERSAL_CHECKPOINT_VERSION_KEY,
    UNIVERSAL_CHECKPOINT_VERSION_VALUE,
)
from torch import Tensor, nn

from ds_layerwise.checkpoint.manifest import Manifest, leads_out
from ds_layerwise.checkpoint.plain_values import load_safely, naming
from ds_layerwise.checkpoint.record import (
    ADAM,
    Header,
    Pieces,
    RuleRecord,
    Saved,
    in_one_piece,
    step_tensor,
    travels_as,
    value_in,
)
from ds_layerwise.checkpoint.regular import KEY, RegularCheckpoint, describe, header_of, ours_of
from ds_layerwise.errors import LayerWiseError
from ds_layerwise.optimizers.recipe import Shape

#: The pointer file beside universal checkpoints, and the sub-folder for states that DeepSpeed does
#: not know.
LATEST = "latest_universal"
OWN_STATES = "layerwise"

_OF_ONE_RANK = (BASE_OPTIMIZER_STATE, PARAM_SLICE_MAPPINGS, SINGLE_PARTITION_OF_FP32_GROUPS)


def told_the_converter(shapes: Mapping[str, Shape]) -> dict[str, Any]:
    """Return the entries that DeepSpeed's converter needs in the model's file, for uncut parameters
    of ``shapes``.
    """
    # The converter would concatenate 0-d parameters, unless it is told that every tensor-parallel
    # rank has all of them.
    whole = [f"{re.escape(name)}$" for name, shape in shapes.items() if not shape]
    return {
        UNIVERSAL_CHECKPOINT_VERSION_KEY: UNIVERSAL_CHECKPOINT_VERSION_VALUE,
        TP_REPLICATED_PARAMETER_PATTERNS: whole,
    }


def is_universal(folder: Path) -> bool:
    """Tell whether ``folder`` holds a universal checkpoint."""
    return (folder / "zero").is_dir()


class UniversalCheckpoint:
    """A universal checkpoint of any package; see :class:`.record.Saved`.

    Raises:
        LayerWiseError: the folder has none, or a file is missing, unreadable or in a newer format;
            names it.
    """

    save_id = ""

    def __init__(self, folder: Path) -> None:
        self._zero = folder / "zero"
        state_path = self._zero / "optimizer_state.pt"
        state_dict: Any = {}
        if state_path.exists():
            state_dict = load_safely(state_path, with_objects=True)
        if not isinstance(state_dict, dict):
            raise LayerWiseError(
                f"{state_path} holds no dict; it is not an optimizer state of DeepSpeed"
            )
        shapes = {}
        for folder in sorted(path.parent for path in self._zero.rglob("fp32.pt")):
            name = folder.relative_to(self._zero).as_posix()
            shapes[name] = tuple(self._read(folder / "fp32.pt").shape)
        if not shapes:
            raise LayerWiseError(
                f"{self._zero} holds no fp32.pt of any parameter; it is not a universal checkpoint"
            )
        if KEY in state_dict:
            self.header = self._own_header(state_dict, state_path, shapes)
        else:
            self.header = self._foreign_header(state_dict, shapes)

    def _own_header(
        self, state_dict: Mapping[str, Any], path: Path, shapes: dict[str, Shape]
    ) -> Header:
        with naming(path):
            ours = ours_of(state_dict, path)
            header = header_of(state_dict)
        if ours.get("listed"):
            Manifest.read(self._zero.parent)
        if missing := header.shapes.keys() - shapes.keys():
            raise LayerWiseError(
                f"{self._zero / min(missing) / 'fp32.pt'} is missing; the checkpoint is not whole"
            )
        if ours.get("num_parts") in (None, 1):
            # The converter merges the parts of a model that was cut, but keeps the header of one
            # rank.
            shapes = {**shapes, **header.shapes}
        return replace(header, shapes=shapes, num_parts=1)

    def _foreign_header(self, state_dict: Mapping[str, Any], shapes: dict[str, Shape]) -> Header:
        step = self._foreign_step(state_dict)
        rules = {}
        for name in shapes:
            keys = {file.stem for file in (self._zero / name).glob("*.pt")} - {"fp32", "step"}
            if keys == {"exp_avg", "exp_avg_sq"} and step is not None:
                rules[name] = ADAM
            elif keys:
                rules[name] = RuleRecord("an unknown optimizer", tuple(sorted(keys)), None)
        groups = {**state_dict.get(OPTIMIZER_STATE_DICT, {}), **state_dict}.get(PARAM_GROUPS)
        return Header(step=step or 0, shapes=shapes, rules=rules, configured=groups)

    def _foreign_step(self, state_dict: Mapping[str, Any]) -> int | None:
        """Return the number of updates. The converter writes it for each parameter; for ZeRO-3 it
        leaves it in the dict.
        """
        for path in self._zero.rglob("step.pt"):
            return int(load_safely(path))
        states = state_dict.get(OPTIMIZER_STATE_DICT, {}).get("state", {})
        steps = []
        for state in states.values():
            if "step" in state:
                steps.append(int(state["step"]))
        return max(steps, default=None)

    @staticmethod
    def _read(path: Path) -> Tensor:
        # Not cached: the system limits the number of mapped files per process.
        value = load_safely(path)
        if isinstance(value, dict):
            value = value.get(PARAM)
        if not isinstance(value, (Tensor, int, float)):
            raise LayerWiseError(
                f"{path} holds no tensor; it is not a file of a universal checkpoint"
            )
        if isinstance(value, float):
            dtype = torch.float32
        else:
            dtype = None
        return torch.as_tensor(value, dtype=dtype, device="cpu")

    def value(self, name: str, key: str) -> Tensor:
        """Return the state ``key`` of ``name``, or its weights for the key ``fp32``, in the saved
        shape.

        Raises:
            LayerWiseError: the file is missing or damaged.
        """
        folder = self._zero / name
        own = folder / OWN_STATES / f"{key}.pt"
        if own.exists():
            return self._read(own)
        carried = travels_as(self.header.keys(name)).get(key, key)
        if carried == "step" and not (folder / "step.pt").exists():
            return step_tensor(self.header.step)
        path = folder / f"{carried}.pt"
        if not path.exists():
            raise LayerWiseError(
                f"{path} is missing; if DeepSpeed's converter wrote this folder, it left out what "
                "it does not know: convert with `ds-layerwise to-universal`, which leaves out "
                "nothing"
            )
        return self._read(path)

    def pieces(self, name: str, start: int, stop: int) -> Pieces:
        """Return one piece, the whole parameter; see :meth:`.record.Saved.pieces`."""
        tensors = {key: self.value(name, key or "fp32") for key in self.header.keys(name)}
        return in_one_piece(name, tensors, self.header.shapes[name])


def write_parameters(saved: Saved, folder: Path, names: Iterable[str]) -> list[str]:
    """Write ``names`` of ``saved`` into the universal checkpoint ``folder``. Return the paths of
    the files within ``folder``.

    It needs memory for one state of one parameter that has more than one piece; else none.
    """
    written = []
    for name in names:
        shape = tuple(saved.header.shapes[name])
        axis, runs, *_ = (saved.header.cuts or {}).get(name) or (0, 1)
        # DeepSpeed's optimizers cut it so.
        cut = {CAT_DIM: axis, PARAM_N_SUB_PARAMS: runs}
        keys = saved.header.keys(name)
        pieces = saved.pieces(name, 0, math.prod(shape))
        _check_paths(name, keys[1:])
        in_place = {"": "fp32", **pieces[0].convertible()}

        def write(file: str, content: Any) -> None:
            path = folder / "zero" / name / f"{file}.pt"
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.save(content, path)
            written.append(path.relative_to(folder).as_posix())

        for key in keys:
            content: Any = pieces[0].values_of(key).clone()
            if pieces[0].is_elementwise(key) and key != "step":
                content = {PARAM: value_in(pieces, key, shape), **cut}
            elif key != "step":
                content = {PARAM: content}
            write(in_place.get(key, f"{OWN_STATES}/{key}"), content)
        zeros = torch.zeros((), dtype=torch.float32, device="cpu").expand(shape)
        unused = dict.fromkeys(("exp_avg", "exp_avg_sq"), {PARAM: zeros, **cut})
        for key, content in {**unused, "step": step_tensor(saved.header.step)}.items():
            if key not in in_place.values():
                write(key, content)
    return written


def _check_paths(name: str, keys: Iterable[str] = ()) -> None:
    """Refuse names of parameters (folders here) and of states (files here) that lead out of the
    folder.

    Raises:
        LayerWiseError: ``name``, or one of ``keys``, does.
    """
    if leads_out(name):
        raise LayerWiseError(
            f"{name!r} leads out of the folder zero, in which a parameter's name is a folder; "
            "rename it in the model"
        )
    for key in keys:
        if leads_out(key) or "/" in key:
            raise LayerWiseError(
                f"the state {key!r} of {name} is not a file name; rename it in the optimizer"
            )


def write_common(saved: RegularCheckpoint, header: Header, folder: Path) -> list[str]:
    """Write the values that belong to no parameter. Return the paths of the files within
    ``folder``.

    Args:
        saved: a checkpoint that has them.
        header: the header of the whole model.
    """
    state_dict = saved.state_dict(0)
    (folder / "zero").mkdir(parents=True, exist_ok=True)
    common = {key: value for key, value in state_dict.items() if key not in _OF_ONE_RANK}
    common[PARAM_GROUPS] = state_dict[BASE_OPTIMIZER_STATE][PARAM_GROUPS]
    common[KEY] = {
        **state_dict[KEY],
        **describe(header)[KEY],
        "extra_states": {},
        "param_starts": {},
        "listed": True,
    }
    # DeepSpeed's stage 3 takes the step from here. It gives every group the settings of the first
    # one, so if rates differ, its groups keep those of its config.
    step = {"step": step_tensor(header.step)}
    rates = {group["lr"] for group in header.param_groups or ()}
    alike = {"lr": rates.pop()} if len(rates) == 1 else {}
    common[OPTIMIZER_STATE_DICT] = {"state": {0: step}, PARAM_GROUPS: [alike]}
    torch.save(common, folder / "zero" / "optimizer_state.pt")
    return ["zero/optimizer_state.pt"]


def write_model(model_file: Path, others: Mapping[str, Any], folder: Path) -> list[str]:
    """Write the untrained part. Return the paths of the files within ``folder``.

    Args:
        model_file: DeepSpeed's file with the module, the scheduler and the client's state, which is
            linked or copied.
        others: the values of the module's ``state_dict`` that are not trained, by name.
    """
    # The second name is the one that DeepSpeed's own optimizers look for at stage 3.
    written = [model_file.name, f"zero_pp_rank_0_{model_file.name}"]
    for name in written:
        try:
            os.link(model_file, folder / name)
        except OSError:
            shutil.copy2(model_file, folder / name)
    seen = set()
    for name, value in others.items():
        if not isinstance(value, Tensor) or id(value) in seen:
            continue
        if isinstance(value, nn.Parameter):
            # A tied parameter is listed under one of its names.
            seen.add(id(value))
        _check_paths(name)
        place = folder / "zero" / name
        place.mkdir(parents=True, exist_ok=True)
        # float32 represents every number of shorter floating-point types, but not all of int64 or
        # float64.
        if value.is_floating_point() and value.element_size() < 4:
            value = value.float()
        torch.save({PARAM: value.detach().clone()}, place / "fp32.pt")
        written.append(f"zero/{name}/fp32.pt")
    return written
