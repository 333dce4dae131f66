"""Meshes of plans: a model on the meta device is spread over ranks as an engine, or the script of a
run, spreads it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from deepspeed.moe.utils import is_moe_param
from deepspeed.runtime.utils import partition_balanced
from torch import nn

from ds_layerwise.config.ds_config import at, tensor_and_other
from ds_layerwise.errors import ConfigError
from ds_layerwise.optimizers.fields import Count, check
from ds_layerwise.parallel import pipeline
from ds_layerwise.plan.layout.layout import ParamSpec
from ds_layerwise.routing.module_of import config_value
from ds_layerwise.routing.tensor_marks import is_cut

#: The keys of a config with the size of an axis.
_KEYS = {
    "tp": "tensor_parallel.autotp_size",
    "ep": "expert_parallel.autoep_size",
    "sp": "sequence_parallel_size",
}
#: The styles of AutoEP's stacks.
_STACKS = {"experts.w1": "colwise", "experts.w2": "rowwise", "experts.w3": "colwise"}


class Mesh(NamedTuple):
    """The sizes of the axes over which a run spreads its model and its sequences."""

    tp: int
    """The number of tensor-parallel parts of a matrix."""
    ep: int
    """The number of ranks that share the experts."""
    sp: int
    """The number of ranks that share a sequence."""
    pp: int
    """The number of pipeline stages."""

    @classmethod
    def of(cls, given: Mapping[str, Any], asked: Mapping[str, Any]) -> Mesh:
        """Read the sizes from a DeepSpeed config, and from the options of ``plan``, by axis.

        Raises:
            ConfigError: an option contradicts the config.
        """
        sizes = {"pp": asked.get("pp") or 1}
        for axis, key in _KEYS.items():
            said = at(given, key) or None
            if axis == "ep" and not at(given, "expert_parallel.enabled"):
                said = None
            size = asked.get(axis) or said or 1
            if said not in (None, size):
                raise ConfigError(
                    f"--{axis} is {size}, and {key} in the config is {said!r}; leave the option "
                    "out, or change the config"
                )
            sizes[axis] = check(Count, key, size)
        if min(at(given, _KEYS[axis]) or 1 for axis in ("tp", "sp")) > 1:
            raise tensor_and_other(sizes["tp"])
        return cls(**sizes)

    def sharing(self, num_ranks: int) -> int:
        """Return how many of all ranks of a run share a gradient.

        Raises:
            ConfigError: the axes do not divide the ranks.
        """
        sharing, left = divmod(num_ranks, self.pp * self.tp)
        if left or sharing % self.sp:
            raise ConfigError(
                f"--ranks is {num_ranks}, all ranks of a run, and pp {self.pp} x tp {self.tp} x sp "
                f"{self.sp} does not divide it"
            )
        return sharing

    def ep_size(self, expert: str, group_name: str) -> int:
        """Return the number of ranks that share the experts of a group, from the name that
        DeepSpeed gives the group.

        Raises:
            ConfigError: the name is not DeepSpeed's, or says another number than the mesh.
        """
        size = group_name.removeprefix("ep_size_")
        if not size.isdecimal() or self.ep not in (1, int(size)):
            raise ConfigError(
                f"{expert} is an expert of group {group_name}, and a plan reads the number of "
                f"ranks from names like ep_size_4, which has to be that of --ep, {self.ep}; build "
                "experts with deepspeed.moe.layer.MoE, and leave --ep out"
            )
        return int(size)

    def spread(self, model: nn.Module, config: Mapping[str, Any]) -> bool:
        """Leave of ``model`` the parts that one rank has, but for the cut into pipeline stages. A
        model that is spread already stays as it is.

        Returns:
            True if it has experts of ``deepspeed.moe``, and not AutoEP's.

        Raises:
            ConfigError: the model cannot be spread so, or a run of ``config`` would refuse it.
        """
        section = config.get("expert_parallel") or {}
        experts = list(filter(is_moe_param, model.parameters()))
        if not experts and (self.ep > 1 or section.get("enabled")):
            _replace_experts(model, {**section, "enabled": True, "autoep_size": self.ep})
        if self.tp > 1:
            _cut(model, self.tp, config.get("tensor_parallel") or {})
            matrices = (p for p in model.parameters() if is_moe_param(p) and p.dim() > 1)
            if section.get("enabled") or not all(map(is_cut, matrices)):
                raise ConfigError(
                    "a plan does not know experts that are whole beside tensor parallelism, such "
                    "as AutoEP's beside AutoTP; plan with --tp and --ep, which cut them, too, and "
                    "without expert_parallel in the config"
                )
        return not all(hasattr(param, "ds_zero_partition_group_name") for param in experts)

    def stages_of(self, model: nn.Module, specs: Sequence[ParamSpec]) -> list[list[ParamSpec]]:
        """Return those of ``specs`` that each pipeline stage has, as DeepSpeed's ``PipelineModule``
        cuts a model by "parameters". A layer is what has one number in the names of a model, or a
        module that has none; tied parameters are on all stages that use them.

        Raises:
            ConfigError: a stage has nothing to train.
        """
        names = {param: name for name, param in model.named_parameters()}
        layers: dict[str, dict[str, int]] = {}
        for name, param in model.named_parameters(remove_duplicate=False):
            layer = re.sub(r"(\b\d+)\..*|\.[^.]*$", r"\1", name, count=1)
            layers.setdefault(layer, {})[names[param]] = param.numel() * param.requires_grad
        sizes = [sum(layer.values()) for layer in layers.values()]
        stages = []
        for first, last in pairwise(partition_balanced(sizes, self.pp)):
            mine = set().union(*[*layers.values()][first:last])
            stages.append([spec for spec in specs if spec.name in mine])
        if [] in stages:
            raise pipeline.nothing_to_train(stages.index([]))
        return stages


def _replace_experts(model: nn.Module, section: Mapping[str, Any]) -> None:
    """Replace the layers of experts by AutoEP's, with the experts of one rank.

    Args:
        section: ``expert_parallel`` of a config.

    Raises:
        ConfigError: AutoEP finds no layers of experts.
    """
    from deepspeed.module_inject import auto_ep, auto_ep_config

    config = auto_ep_config.parse_autoep_config(section)
    replacing = auto_ep.AutoEP(model, config)
    found = replacing.ep_parser()
    auto_ep_config.validate_autoep_post_detection(config, found)
    with torch.device("meta"):
        for layer in found:
            # Without hooks that record outputs, which not all releases of transformers have.
            replacing._replace_moe_layer_without_retarget(layer, config.autoep_size, 0)
    if not found:
        raise ConfigError(
            "AutoEP finds no layers of experts in the model; name them with moe_layer_pattern and "
            "the like in expert_parallel, or build them with deepspeed.moe"
        )


def _cut(model: nn.Module, size: int, section: Mapping[str, Any]) -> None:
    """Cut parameters to one of ``size`` parts, as transformers' plan of the model says and AutoTP
    does it, and mark them.

    Args:
        section: ``tensor_parallel`` of a config.

    Raises:
        ConfigError: nothing is cut, or parts are not of equal size.
    """
    from deepspeed.module_inject.tp_plan_converter import TPPlanConverter
    from deepspeed.runtime.tensor_parallel.config import _get_hf_tp_plan

    plan = _get_hf_tp_plan(model) or {}
    if section:
        TPPlanConverter.convert(plan)
    heads = config_value(getattr(model, "config", None), "num_key_value_heads") or size
    for name, param in model.named_parameters(remove_duplicate=False):
        for key, style in {**plan, **_STACKS}.items():
            behind = 2 if "colwise" in style else int(style == "rowwise")
            # The bias of a layer that is cut along its inputs is whole.
            is_whole = not behind or behind == param.dim() == 1
            if is_whole or is_cut(param) or not fnmatchcase(name, f"*{key}*"):
                continue
            shape = list(param.shape)
            dim = max(len(shape) - behind, 0)
            if shape[dim] % size or heads % size:
                raise ConfigError(
                    f"{name} {tuple(shape)}, with {heads} heads of keys and values, cannot be cut "
                    f"into {size} parts of equal size along axis {dim}; choose a number of "
                    "tensor-parallel ranks that divides both"
                )
            shape[dim] //= size
            param.data = param.data.new_empty(shape)
            marks = {"tensor_model_parallel": True, "partition_dim": dim}
            vars(param).update(marks, partition_stride=1 + (style == "packed_colwise"))
    by_user = {"partition_config", "preset_model"} & {*section}
    if by_user or not any(map(is_cut, model.parameters())):
        raise ConfigError(
            f"a plan cuts a model into {size} tensor-parallel parts as its class in transformers "
            "says (base_model_tp_plan), not as tensor_parallel.partition_config or preset_model "
            f"do, and nothing of {type(model).__name__} is cut so; give a module:function that "
            "builds and marks the layers of one rank"
        )
