"""Access to the inside of an engine's optimizer. Tests use its private names here alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ds_layerwise.ranks.comm.streams import SideStream
from ds_layerwise.zero.step.first_step import FirstStep


def owned(engine: Any) -> Any:
    """Return the part of the optimizer that this rank updates: masters, states and reduced gradients of its pieces."""
    return engine.optimizer._run.owned


def fetch_on(engine: Any, stream: Any) -> None:
    """Let DeepSpeed's fetches, at ZeRO stage 3, count as work on ``stream``."""
    engine.optimizer._run.places._fetches = SideStream(stream)


def pieces(engine: Any) -> list[Any]:
    """Return this rank's pieces of parameters, with their places, in the order of the buckets."""
    return [piece for of_bucket in owned(engine).pieces for piece in of_bucket]


def records(engine: Any) -> list[Any]:
    """Return this rank's pieces in the form in which a checkpoint takes them, with their masters and states."""
    return owned(engine).record()


def planned(engine: Any) -> Any:
    """Return the plan that the ranks have agreed on for the model: layout, links, nodes."""
    return engine.optimizer._run.planned


def states(engine: Any) -> dict[str, dict[str, torch.Tensor]]:
    """Return this rank's live states by parameter."""
    return owned(engine).states


def bytes_of_states(engine: Any) -> int:
    """This rank's bytes of states, but for numbers such as the count of steps."""
    return sum(value.nbytes for state in states(engine).values() for value in state.values() if value.dim())


def master(engine: Any, name: str) -> torch.Tensor:
    """Return this rank's piece of the master of a parameter, 1-D and live."""
    return owned(engine).value(name)


def masters(engine: Any) -> list[torch.Tensor]:
    """Return the memory of all masters of this rank."""
    return [tensor for each in owned(engine).masters for tensor in each.tensors]


def reduced(engine: Any, name: str) -> torch.Tensor:
    """Return this rank's piece of the reduced gradient of a parameter, 1-D and live."""
    return owned(engine).reduced.piece(name)


def shards(engine: Any) -> list[Any]:
    """Return the shards with an element for each that this rank owns: masters and reduced gradients, by bucket."""
    return [[masters.memory for masters in owned(engine).masters], list(owned(engine).reduced.tensors)]


def poison_sums(engine: Any) -> None:
    """Fill memory of reduced gradients with NaN whenever it is taken."""
    reduced = owned(engine).reduced
    allocate = reduced.allocate

    def poisoned(index: int) -> torch.Tensor:
        had = reduced.tensors[index].untyped_storage().nbytes()
        shard: torch.Tensor = allocate(index)
        if not had:
            shard.fill_(float("nan"))
        return shard

    reduced.allocate = poisoned


def update_sets(engine: Any) -> list[Any]:
    """Return by bucket the parameters that one rule updates together."""
    return list(owned(engine)._updates)


def host_tensors(engine: Any) -> list[torch.Tensor]:
    """Return the tensors that this rank keeps in the memory of the host."""
    return list(owned(engine).host.tensors)


def grads(engine: Any) -> Any:
    """Return the buffer that gradients of all parameters accumulate in, or None where there is none."""
    return engine.optimizer._run.grads


def buffers(engine: Any) -> list[Any]:
    """Return the buffers with an element for each of all parameters: their values, and their gradients where they have
    one."""
    run = engine.optimizer._run
    return [buffer for buffer in (getattr(run.places, "values", run.shards), run.grads) if buffer is not None]


def values_of_shards(engine: Any) -> tuple[torch.Tensor, ...]:
    """The values that this rank owns, at ZeRO stage 3, bucket by bucket."""
    return tuple(engine.optimizer._run.shards.tensors)


def shapes(engine: Any) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the whole parameters that are trained."""
    return dict(engine.optimizer._run.shapes)


def trained(engine: Any) -> dict[str, torch.nn.Parameter]:
    """Return the parameters that are trained, by name."""
    return engine.optimizer._params


def grad_sync(engine: Any) -> Any:
    """Return the object that reduces gradients, bucket by bucket."""
    return engine.optimizer._run.grad_sync


def param_sync(engine: Any) -> Any:
    """Return the object that sends new weights, bucket by bucket."""
    return engine.optimizer._run.param_sync


def exchanges(engine: Any) -> tuple[Any, Any]:
    """Return the objects that move sums from cuts to owners, and parameters back."""
    return grad_sync(engine)._transfer, param_sync(engine)._transfer


def ready(engine: Any) -> int:
    """Return how many buckets of gradients may start, or have started, in this step."""
    return int(grad_sync(engine)._scheduler.ready)


def launched(engine: Any) -> int:
    """Return how many buckets of gradients are under way, or were, in this step."""
    return int(grad_sync(engine)._scheduler.launched)


def pending(engine: Any) -> list[Any]:
    """Return the reductions that nobody has waited for, in the order in which they began."""
    return list(grad_sync(engine)._scheduler._pending)


def seen_at(owner: Any, name: str, look: Callable[[], Any], *, after: bool = False) -> list[Any]:
    """Return a list that gets the value of ``look`` before each call of a method, or ``after`` it."""
    values, call = [], getattr(owner, name)

    def looking(*args: Any, **kwargs: Any) -> Any:
        if not after:
            values.append(look())
        result = call(*args, **kwargs)
        if after:
            values.append(look())
        return result

    setattr(owner, name, looking)
    return values


def seen_at_launches(engine: Any, look: Callable[[], Any], *, after: bool = False) -> list[Any]:
    """Return a list that gets the value of ``look`` before each start of a bucket of gradients, or ``after`` it."""
    return seen_at(grad_sync(engine)._scheduler, "_launch", look, after=after)


def wires(engine: Any) -> Any:
    """Return the way buckets travel among the ranks that hold the same parameters, experts apart."""
    return grad_sync(engine)._wires[1]


def cuts(engine: Any) -> list[torch.Tensor]:
    """Return the sums of this rank's cuts of buckets, until they are with their owners."""
    return list(grad_sync(engine).cuts)


def before_update(engine: Any) -> Any:
    """Return the object that checks a step and lets the ranks agree on it."""
    return engine.optimizer._before_update


def forget_cuts(engine: Any) -> None:
    """Save as versions did that wrote nothing of the cuts of tensor parallelism."""
    engine.optimizer.checkpointing._cuts = None


def access(engine: Any) -> Any:
    """Return the access of DeepSpeed's functions to the values of parameters."""
    return engine.optimizer._access


def replace_plain_update(engine: Any, name: str, update: Any, monkeypatch: Any) -> None:
    """Let ``update`` compute what the first update of parameter ``name`` is compared with."""
    check = first_step(engine)
    real = check._update_plainly

    def chosen(of: str, *args: Any) -> None:
        (update if of == name else real)(of, *args)
    monkeypatch.setattr(check, "_update_plainly", chosen)


def gathers_under_way(engine: Any) -> dict[int, Any]:
    """Return the gathers of new weights that nobody has waited for, by bucket."""
    return param_sync(engine)._pending


def decision(engine: Any) -> Any:
    """Return the decision of the ranks on the current gradients, as at the beginning of a step. All ranks must call
    this."""
    optimizer = engine.optimizer
    return optimizer._before_update.decide(
        clip_grad=optimizer.clip_grad, loss_scale=optimizer.loss_scale)


def interrupt(engine: Any) -> None:
    """Mark this rank's last update as interrupted."""
    with engine.optimizer.interrupted.at(1):
        raise MemoryError("taken")


def specs(engine: Any) -> list[Any]:
    """Return the specs of the trained parameters."""
    return list(engine.optimizer._run.planned.specs)


def first_step(engine: Any) -> Any:
    """Return the check that compares the first update with a plain one."""
    return next(observer for observer in engine.optimizer._observers if isinstance(observer, FirstStep))


def is_first_step_due(engine: Any) -> bool:
    """Return whether the next update will be compared with a plain one."""
    return bool(first_step(engine).looks)


def param_cuts(engine: Any) -> list[torch.Tensor]:
    """Return the memory of this rank's cuts of whole parameters at ZeRO stage 3."""
    return list(param_sync(engine)._all_cuts.tensors[len(engine.optimizer._run.shards.weights):])


def persistent(engine: Any) -> list[torch.Tensor]:
    """Return parameters that DeepSpeed leaves whole at ZeRO stage 3, and the copies that show what is written."""
    cuts = param_sync(engine)._all_cuts
    return [*cuts.persistent().values(), *cuts._fetched]


def memory_by_kind(engine: Any) -> dict[Any, int]:
    """Return bytes by kind. Memory of two kinds counts for the first."""
    num_bytes: dict[Any, int] = {}
    seen: set[int] = set()
    for kind, tensors in engine.optimizer.offloading.memory().items():
        storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
        num_bytes[kind] = sum(size for key, size in storages.items() if key not in seen)
        seen |= storages.keys()
    return num_bytes


def written_weights(engine: Any) -> list[str]:
    """Return the weights that this rank keeps beside their masters at ZeRO stage 3, as a script has written them."""
    return sorted(engine.optimizer._run.shards.written)
