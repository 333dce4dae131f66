"""Masters and states of an engine, and the folders that it saves, as tests look at them."""

from __future__ import annotations

import deepspeed.comm as dist
import torch

from ds_layerwise.checkpoint import single_file
from tests.support import internals
from tests.support.training import from_all_ranks, weights


def states(engine):
    """Return copies of this rank's states by (parameter, state)."""
    return {(name, key): value.clone() for name, state in internals.states(engine).items()
            for key, value in state.items()}


def whole_states(engine):
    """Return every master (key ``fp32``) and state of every parameter, 1-D, put together from all ranks."""
    everyone = from_all_ranks([(p.name, p.param_start, p.master, p.state) for p in internals.records(engine)])
    whole: dict[tuple[str, str], list[torch.Tensor]] = {}
    for name, _, master, state in sorted((e for of_rank in everyone for e in of_rank), key=lambda e: e[1]):
        for key, value in {"fp32": master, **state}.items():
            whole.setdefault((name, key), []).append(value)
    return {k: v[0].clone() if v[0].dim() == 0 else torch.cat(v) for k, v in whole.items()}


def masters(engine):
    """Return whole masters by name, in the shapes of their parameters."""
    shapes = internals.shapes(engine)
    return {name: value.view(shapes[name]) for (name, key), value in whole_states(engine).items() if key == "fp32"}


def assert_equal_states(found, expected, where=""):
    """Check that both have the same keys, and the same bits under each."""
    assert found.keys() == expected.keys(), (where, found.keys() ^ expected.keys())
    for key, value in expected.items():
        assert torch.equal(found[key], value), (where, key)


def assert_equal_contents(found, expected, where):
    """Equal tensors, dtypes and builtins, however deep."""
    assert type(found) is type(expected), where
    if isinstance(expected, torch.Tensor):
        assert found.dtype == expected.dtype and torch.equal(found, expected), where
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys(), where
        for key, value in expected.items():
            assert_equal_contents(found[key], value, (*where, key))
    elif isinstance(expected, (list, tuple)):
        assert len(found) == len(expected), where
        for index, value in enumerate(expected):
            assert_equal_contents(found[index], value, (*where, index))
    elif hasattr(expected, "__dict__"):
        assert_equal_contents(vars(found), vars(expected), where)
    else:
        assert found == expected, where


def assert_same_run(engine, expected, where="", of=whole_states):
    """Check that two engines have the same weights and the same ``of(engine)``, bit for bit: by default, masters and
    states."""
    assert_equal_states(of(engine), of(expected), where)
    assert torch.equal(weights(engine.module), weights(expected.module)), where


#: The name of the file of whole parameters, in the folder where a test saves.
ONE_FILE = "whole.safetensors"


def loaded(engine, folder, **options):
    """Return the engine after ``load_checkpoint``."""
    engine.load_checkpoint(folder, **options)
    return engine


def go_on_from(engine, folder, tag):
    """Load the checkpoint ``tag``, or the one file if ``tag`` is None."""
    if tag is None:
        engine.optimizer.load_state_dict_from_file(folder / ONE_FILE)
    else:
        engine.load_checkpoint(folder, tag=tag)


def on_rank_0(do):
    """Call ``do`` on rank 0 while the other ranks wait, so that none of them reads too early or too late."""
    dist.barrier()
    if dist.get_rank() == 0:
        do()
    dist.barrier()


def write_one_file(path, tensors, header):
    """Write the file of ``save_state_dict_to_file`` from whole ``tensors``, by their names in it."""
    sums = {name: single_file.sums_of(value) for name, value in tensors.items()}
    beside = single_file.write_beside(header, sums)
    tensors = dict(sorted(tensors.items(), key=lambda item: (-item[1].dtype.itemsize, item[0])))
    tensors[single_file.HEADER] = beside
    single_file.write(path, {name: (value.dtype, tuple(value.shape)) for name, value in tensors.items()},
                      tensors.values())
