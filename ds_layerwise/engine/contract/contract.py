"""The names of DeepSpeed that this package wraps, extends or replaces.

:func:`missing` looks up all of them before anything is patched. A release that has changed one is
refused as a whole, with a list of all changes. Names that are only imported or read, and those that
classes do not show because each object gets its own, are listed in
tests/support/deepspeed_names.py, and tests look them up.

Note: how to support the next release
    Run ``python -m tests.contract_releases FOLDER`` with the release installed in FOLDER, and fix
    the entries that it names. If a name was wrapped or extended and has a new path, set ``path`` to
    it and ``was`` to the old one.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import Any

import deepspeed

from ds_layerwise.errors import ConfigError

#: The releases in setup.cfg: the first supported, the newest tested, and the first unsupported one.
OLDEST = "0.19.4"
NEWEST = "0.19.8"
BELOW = "0.20"


@dataclass(frozen=True)
class Name:
    """A name of DeepSpeed."""

    path: str
    """The path: module, class and name."""

    parameters: str | None = None
    """The arguments, including ``self``, with which DeepSpeed calls the method or function that is
    wrapped or replaced. It may have more with defaults. None for a list, which is extended.
    """

    was: str | None = None
    """An earlier path, used if ``path`` does not exist."""

    @property
    def key(self) -> str:
        """The last part of the first path that it had. The package uses it as the key."""
        return (self.was or self.path).rpartition(".")[2]

    def place(self) -> tuple[Any, str]:
        """Return the class or module that has the name in the installed DeepSpeed, and the name
        there.

        Raises:
            ConfigError: it does not exist.
        """
        for path in filter(None, (self.path, self.was)):
            place, _, name = path.rpartition(".")
            try:
                owner = resolve_name(place)
            except (ImportError, AttributeError):
                continue
            own = []
            if isinstance(owner, type):
                package = owner.__module__.partition(".")[0]
                for base in owner.__mro__:
                    if base.__module__.partition(".")[0] == package:
                        own.append(base)
            for base in own or [owner]:
                if name in vars(base):
                    return owner, name
        raise ConfigError(f"{self.was or self.path} is not there")

    def problem(self) -> str | None:
        """Describe the problem with it in the installed DeepSpeed; None if it is as expected."""
        try:
            value = getattr(*self.place())
        except ConfigError as absent:
            return str(absent)
        if self.parameters is None:
            if isinstance(value, list):
                return None
            return f"{self.path} is not a list"
        changed = difference(value, self.parameters.split())
        return changed and f"{self.path} {changed}"


def difference(function: Any, expected: Sequence[str]) -> str | None:
    """Describe how ``function`` differs from one that takes the arguments ``expected``, in this
    order or by name; None if it does not.

    It may have more arguments with defaults.
    """
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return "cannot be called"
    named = []
    for p in parameters:
        if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD):
            named.append(p)
    # The signature of a general decorator does not show that of the function inside.
    takes_anything = not named and len(parameters) == 2
    start = named[: len(expected)]
    more = named[len(expected) :]
    is_expected = [p.name for p in start] == list(expected)
    if takes_anything or is_expected and all(p.default is not p.empty for p in more):
        return None
    return f"takes {inspect.signature(function)}, not ({', '.join(expected)})"


_CONFIG = "deepspeed.runtime.config"
_ENGINE = "deepspeed.runtime.engine.DeepSpeedEngine"

CONTRACT = (
    Name(f"{_CONFIG}.get_zero_config", "param_dict"),
    Name(f"{_CONFIG}.DeepSpeedConfig._initialize_params", "self param_dict"),
    Name(f"{_CONFIG}.DeepSpeedConfig._configure_train_batch_size", "self"),
    Name(f"{_ENGINE}.__init__", "self args model optimizer model_parameters"),
    Name(f"{_ENGINE}._configure_with_arguments", "self args mpu"),
    Name(f"{_ENGINE}._do_sanity_check", "self"),
    Name(f"{_ENGINE}._configure_expert_parallel", "self model"),
    Name(f"{_ENGINE}._configure_distributed_model", "self model"),
    Name(f"{_ENGINE}._broadcast_model", "self"),
    Name(f"{_ENGINE}._configure_optimizer", "self client_optimizer model_parameters"),
    Name(f"{_ENGINE}._configure_basic_optimizer", "self model_parameters"),
    Name(f"{_ENGINE}._do_optimizer_sanity_check", "self basic_optimizer"),
    Name(f"{_ENGINE}._configure_zero_optimizer", "self optimizer"),
    Name(f"{_ENGINE}._configure_lr_scheduler", "self"),
    Name(f"{_ENGINE}._scheduler_from_config", "self optimizer"),
    Name(f"{_ENGINE}.zero_grad", "self"),
    Name(f"{_ENGINE}.zero_use_cpu_optimizer", "self"),
    Name(f"{_ENGINE}._take_model_step", "self lr_kwargs"),
    Name(f"{_ENGINE}.save_checkpoint", "self save_dir tag client_state save_latest"),
    Name(f"{_ENGINE}._save_checkpoint", "self save_dir tag"),
    Name(f"{_ENGINE}._save_moe_checkpoint", "self save_dir tag"),
    Name(f"{_ENGINE}._save_zero_checkpoint", "self save_path tag"),
    Name(f"{_ENGINE}._commit_decoupled_checkpoint", "self"),
    Name(f"{_ENGINE}.save_16bit_model", "self save_dir"),
    Name(f"{_ENGINE}._replace_module_consolidated_state_dict", "self"),
    Name(f"{_ENGINE}.destroy", "self"),
    Name(
        f"{_ENGINE}.load_checkpoint",
        "self load_dir tag load_module_strict load_optimizer_states load_lr_scheduler_states "
        "load_module_only custom_load_fn",
    ),
    Name(f"{_ENGINE}._load_zero_checkpoint", "self load_dir tag"),
    Name(f"{_ENGINE}.load_module_state_dict", "self checkpoint strict custom_load_fn"),
    Name(f"{_ENGINE}._get_all_ckpt_names", "self checkpoints_path tag"),
    Name("deepspeed.ops.op_builder.builder.OpBuilder.jit_load", "self verbose"),
    # Scripts call it.
    Name("torch.nn.utils.clip_grad_norm_", "parameters max_norm"),
    Name(f"{_CONFIG}.DEEPSPEED_OPTIMIZERS"),
    Name("deepspeed.runtime.zero.utils.ZERO_SUPPORTED_OPTIMIZERS"),
)

_WRITER = "deepspeed.runtime.checkpoint_engine.checkpoint_engine.CheckpointEngine"
_PIPELINE = "deepspeed.runtime.pipe.module.PipelineModule"

#: The methods that are replaced on single objects, by :func:`.instance_patches.patch`.
ON_INSTANCES = (
    Name(f"{_ENGINE}._backward_prologue_per_tensor", "self grad"),
    Name(f"{_ENGINE}._get_param_fragment_func", "self param"),
    Name(f"{_ENGINE}._get_shared_params", "self"),
    Name(f"{_ENGINE}.backward", "self loss"),
    Name(f"{_ENGINE}.module_state_dict", "self"),
    Name(f"{_ENGINE}.step", "self lr_kwargs"),
    Name(f"{_ENGINE}.zero_optimization_partition_gradients", "self"),
    Name(f"{_ENGINE}.zero_optimization_partition_weights", "self"),
    Name(f"{_WRITER}.makedirs", "self path exist_ok"),
    Name(f"{_WRITER}.preserves_storage_sharing", "self"),
    Name(f"{_WRITER}.save", "self state_dict path"),
    Name(f"{_PIPELINE}._synchronize_tied_weights", "self"),
    Name(f"{_PIPELINE}.ckpt_layer_path_list", "self ckpt_dir local_layer_idx"),
    Name(f"{_PIPELINE}.load_state_dir", "self load_dir checkpoint_engine strict"),
)


def missing() -> list[str]:
    """Describe each name of the lists that the installed DeepSpeed lacks or has changed."""
    return [problem for name in CONTRACT + ON_INSTANCES if (problem := name.problem())]


def unknown_release(problems: Sequence[str]) -> ConfigError:
    """Return the error that refuses the installed DeepSpeed, for ``problems``."""
    return ConfigError(
        f"DeepSpeed {deepspeed.__version__} is not what ds_layerwise knows "
        f"(>={OLDEST},<{BELOW}):\n  "
        + "\n  ".join(problems)
        + f"\nnothing was patched; install deepspeed=={NEWEST}, or report this list"
    )


def resolve(key: str) -> tuple[Any, str]:
    """Return the class or module of a name in the contract, and its name there.

    Args:
        key: the last part of its path.
    """
    (entry,) = (name for name in CONTRACT if name.key == key)
    return entry.place()
