"""A module that Python imports at its start, in every rank too, where ``tests/upstream.py`` put its folder on the path.

It changes DeepSpeed's reading of a config: ZeRO with Adam or AdamW becomes this backend, as ``UPSTREAM_MODE`` says.
"""

import importlib.abc
import importlib.util
import json
import os
import sys
from multiprocessing import forkserver

MODE = os.environ.get("UPSTREAM_MODE", "stock")
#: The values of stock's Adam where a config says nothing.
STOCK = {"lr": 1e-3, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0}


def replaced(given):
    """Return ``given``, a dict or the path of one, with this backend where it asks for ZeRO with Adam or AdamW."""
    config = given
    if isinstance(given, (str, os.PathLike)) and os.path.exists(given):
        with open(given) as file:
            config = json.load(file)
    if not isinstance(config, dict):
        return given
    optimizer, zero = config.get("optimizer") or {}, config.get("zero_optimization")
    kind = str(optimizer.get("type", "")).lower()
    if kind not in ("adam", "adamw") or not isinstance(zero, dict) or zero.get("stage") not in (1, 2, 3):
        return given
    params = optimizer.get("params") or {}
    # Stock decays vectors, too.
    ours = {**STOCK, **{key: params[key] for key in STOCK if key in params}, "muon_lr": 0.02, "decay_vectors": True}
    decoupled = kind == "adamw" or params.get("adam_w_mode", True)
    ours["scalar_optimizer"] = "adamw" if decoupled else "adam"
    changed = {**config, "optimizer": {"type": "LayerWiseMuon", "params": ours}}
    if MODE == "scalar":
        changed["layerwise"] = {"overrides": [{"name": "*", "optimizer": "scalar"}]}
    with open(os.environ["UPSTREAM_REPLACED"], "a") as file:
        file.write("x")
    return changed


def has_its_own_optimizer():
    """Return whether the ``deepspeed.initialize`` that asks for a config got an optimizer, which wins over the config.
    """
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "initialize" and "config_class" in frame.f_code.co_varnames:
            return frame.f_locals.get("optimizer") is not None
        frame = frame.f_back
    return False


def change(module):
    """Let fp16 train on a CPU, which DeepSpeed refuses as too slow, and ``module.DeepSpeedConfig`` read our config."""
    from deepspeed.accelerator import get_accelerator
    from deepspeed.git_version_info import compatible_ops
    # Only inference uses this operator, and building it takes a compiler. Some of their tests spawn ranks.
    compatible_ops["deepspeed_shm_comm"] = False
    type(get_accelerator()).is_fp16_supported = lambda self: True
    if MODE == "stock":
        return
    original = module.DeepSpeedConfig.__init__

    def __init__(self, config, *args, **kwargs):
        ours = config if has_its_own_optimizer() else replaced(config)
        if ours is not config:
            import ds_layerwise
            ds_layerwise.register()
        original(self, ours, *args, **kwargs)

    module.DeepSpeedConfig.__init__ = __init__


class Finder(importlib.abc.MetaPathFinder):
    """An importer that calls :func:`change` on DeepSpeed's module of configs as soon as it is there."""

    def find_spec(self, name, path=None, target=None):
        """Find that module alone, and only once."""
        if name != "deepspeed.runtime.config":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            change(module)

        spec.loader.exec_module = exec_module
        return spec


# DeepSpeed's harness starts its ranks from the fork server.
forkserver.set_forkserver_preload(["upstream_ranks"])
sys.meta_path.insert(0, Finder())
