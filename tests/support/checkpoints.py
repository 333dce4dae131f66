"""What a test looks at in an engine's masters and states, and in the folders that it saves."""

from __future__ import annotations

import deepspeed.comm as dist
import torch

from ds_layerwise.checkpoint.formats import headers, single_file
from tests.support import internals
from tests.support.training import from_all_ranks, weights


def states(engine):
    """This rank's states by (parameter, state), copies."""
    return {(name, key): value.clone() for name, state in internals.states(engine).items()
            for key, value in state.items()}


def whole_states(engine):
    """Every master (key ``fp32``) and state of every parameter, 1-D, put together from all ranks."""
    everyone = from_all_ranks([(p.name, p.param_start, p.master, p.state) for p in internals.records(engine)])
    whole: dict[tuple[str, str], list[torch.Tensor]] = {}
    for name, _, master, state in sorted((e for mine in everyone for e in mine), key=lambda e: e[1]):
        for key, value in {"fp32": master, **state}.items():
            whole.setdefault((name, key), []).append(value)
    return {k: v[0].clone() if v[0].dim() == 0 else torch.cat(v) for k, v in whole.items()}


def masters(engine):
    """Whole masters by name, in the shape of their parameters."""
    shapes = internals.shapes(engine)
    return {name: value.view(shapes[name]) for (name, key), value in whole_states(engine).items() if key == "fp32"}


def assert_equal_states(found, expected, where=""):
    """The same keys, and the same bits under each."""
    assert found.keys() == expected.keys(), (where, found.keys() ^ expected.keys())
    for key, value in expected.items():
        assert torch.equal(found[key], value), (where, key)


def assert_same_run(engine, expected, where="", of=whole_states):
    """Two engines have the same weights, and the same masters and states, or ``of`` them what that gives, bit for bit.
    """
    assert_equal_states(of(engine), of(expected), where)
    assert torch.equal(weights(engine.module), weights(expected.module)), where


#: Of the one file of whole parameters, in the folder where a test saves.
ONE_FILE = "whole.safetensors"


def loaded(engine, folder, **options):
    """The engine after ``load_checkpoint``."""
    engine.load_checkpoint(folder, **options)
    return engine


def go_on_from(engine, folder, tag):
    """Load the checkpoint ``tag``, or, where that is None, the one file."""
    if tag is None:
        engine.optimizer.load_state_dict_from_file(folder / ONE_FILE)
    else:
        engine.load_checkpoint(folder, tag=tag)


def on_rank_0(do):
    """Call ``do`` on rank 0 while the others wait: none of them still reads what it changes, or reads it too early."""
    dist.barrier()
    if dist.get_rank() == 0:
        do()
    dist.barrier()


def write_one_file(path, tensors, header, scaler):
    """The file of ``save_state_dict_to_file`` from whole ``tensors``, by their names in it."""
    beside = headers.write_beside(header, scaler, {name: headers.sums_of(value) for name, value in tensors.items()})
    tensors = dict(sorted(tensors.items(), key=lambda item: (-item[1].dtype.itemsize, item[0])))
    tensors[single_file.HEADER] = beside
    single_file.write(path, {name: (value.dtype, tuple(value.shape)) for name, value in tensors.items()},
                      tensors.values())
