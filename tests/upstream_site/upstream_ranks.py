"""Imports that every rank of ``tests/upstream.py`` needs, done once in the process that ranks are forks of."""

import importlib
import os

import _pytest.python_api
import torch


def fail(reason, pytrace=True):
    raise AssertionError(reason)


# pytest's own failure is no Exception: a process of a pool dies of it, and DeepSpeed's harness waits for that for ever.
_pytest.python_api.fail = fail

torch.set_num_threads(1)
for name in ("torch._dynamo", "deepspeed.runtime.zero.muon.muon_optimizer"):
    importlib.import_module(name)
if os.environ.get("UPSTREAM_MODE", "stock") != "stock":
    importlib.import_module("ds_layerwise.engine.engine_hooks")
