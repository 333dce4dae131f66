"""What tests know of the inside of an engine's optimizer: the one place that a change of its private names reaches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def owned(engine: Any) -> Any:
    """What this rank updates: masters, states and reduced gradients of its pieces."""
    return engine.optimizer._run.owned


def pieces(engine: Any) -> list[Any]:
    """This rank's pieces of parameters, with their places, in the order of the buckets."""
    return [piece for of_bucket in owned(engine).pieces for piece in of_bucket]


def records(engine: Any) -> list[Any]:
    """This rank's pieces as a checkpoint takes them, with their masters and states."""
    return list(owned(engine).record().pieces)


def planned(engine: Any) -> Any:
    """What the ranks have agreed on for the model: layout, links, nodes."""
    return engine.optimizer._run.planned


def states(engine: Any) -> dict[str, dict[str, torch.Tensor]]:
    """This rank's live states by parameter."""
    return owned(engine).states


def master(engine: Any, name: str) -> torch.Tensor:
    """This rank's piece of the master of a parameter, 1-D and live."""
    return owned(engine)._masters.piece(name)


def reduced(engine: Any, name: str) -> torch.Tensor:
    """This rank's piece of the reduced gradient of a parameter, 1-D and live."""
    return owned(engine).reduced.piece(name)


def shards(engine: Any) -> list[Any]:
    """What has an element for each that this rank owns: masters and reduced gradients."""
    return [owned(engine)._masters, owned(engine).reduced]


def update_sets(engine: Any) -> list[Any]:
    """By bucket, the parameters that one rule updates together."""
    return list(owned(engine)._updates)


def host_tensors(engine: Any) -> list[torch.Tensor]:
    """What this rank keeps in the memory of the host."""
    return list(owned(engine).host.tensors)


def grads(engine: Any) -> Any:
    """The buffer that gradients of all parameters accumulate in, or None where there is none."""
    return engine.optimizer._run.grads


def buffers(engine: Any) -> list[Any]:
    """What has an element for each of all parameters: their values, and their gradients where these have a buffer."""
    return [buffer for buffer in (engine.optimizer._run.values, grads(engine)) if buffer is not None]


def values_of_shards(engine: Any) -> tuple[torch.Tensor, ...]:
    """The values that this rank owns, at ZeRO stage 3, bucket by bucket."""
    return tuple(engine.optimizer._run.values.tensors)


def shapes(engine: Any) -> dict[str, tuple[int, ...]]:
    """The shapes of whole parameters that are trained."""
    return dict(engine.optimizer._run.shapes)


def trained(engine: Any) -> dict[str, torch.nn.Parameter]:
    """The parameters that are trained, by name."""
    return engine.optimizer._params


def grad_sync(engine: Any) -> Any:
    """What reduces gradients, bucket by bucket."""
    return engine.optimizer._run.grad_sync


def param_sync(engine: Any) -> Any:
    """What sends new weights, bucket by bucket."""
    return engine.optimizer._run.param_sync


def exchanges(engine: Any) -> tuple[Any, Any]:
    """What moves sums from cuts to owners, and what moves parameters back."""
    return grad_sync(engine)._exchange, param_sync(engine)._exchange


def ready(engine: Any) -> int:
    """How many buckets of gradients may start, or have started, in this step."""
    return int(grad_sync(engine)._ready)


def launched(engine: Any) -> int:
    """How many buckets of gradients are under way, or were, in this step."""
    return int(grad_sync(engine)._launched)


def pending(engine: Any) -> list[Any]:
    """The reductions that nobody has waited for, in the order in which they began."""
    return list(grad_sync(engine)._pending)


def seen_at(owner: Any, name: str, look: Callable[[], Any], *, after: bool = False) -> list[Any]:
    """What ``look`` gives before each call of a method, or ``after`` it; the list grows with the calls."""
    found, call = [], getattr(owner, name)

    def looking(*args: Any, **kwargs: Any) -> Any:
        if not after:
            found.append(look())
        result = call(*args, **kwargs)
        if after:
            found.append(look())
        return result

    setattr(owner, name, looking)
    return found


def seen_at_launches(engine: Any, look: Callable[[], Any], *, after: bool = False) -> list[Any]:
    """What ``look`` gives before, or ``after``, a bucket of gradients starts."""
    return seen_at(grad_sync(engine), "_launch", look, after=after)


def wires(engine: Any) -> Any:
    """How buckets travel among the ranks that hold the same parameters, experts apart."""
    return grad_sync(engine)._wires[1]


def cuts(engine: Any) -> list[torch.Tensor]:
    """The sums of this rank's cuts of buckets, until they are with their owners."""
    return list(grad_sync(engine).cuts)


def same_weights(engine: Any) -> Any:
    """What compares weights that were written between steps."""
    return engine.optimizer._before_update.same_weights


def access(engine: Any) -> list[Any]:
    """How DeepSpeed's functions reach each parameter's values."""
    return engine.optimizer._access


def plain_rules(engine: Any) -> dict[str, Any]:
    """By parameter, the plain rule that the first update is compared with."""
    return first_step(engine)._plain


def gathers_under_way(engine: Any) -> dict[int, Any]:
    """The gathers of new weights that nobody has waited for, by bucket."""
    return param_sync(engine)._pending


def decision(engine: Any) -> Any:
    """What the ranks decide on the gradients at hand, as at the begin of a step; all of them must ask."""
    optimizer = engine.optimizer
    return optimizer._before_update.decide(
        clip_grad=optimizer.clip_grad, loss_scale=optimizer.loss_scale, inside_pass=False)


def interrupt(engine: Any) -> None:
    """Let this rank take its last update for one that was ended on the way."""
    with engine.optimizer.interrupted.at(1):
        raise MemoryError("taken")


def first_step(engine: Any) -> Any:
    """What compares the first update with a plain one."""
    return engine.optimizer.checkpointing.first_step


def is_first_step_due(engine: Any) -> bool:
    """Whether the next update is to be compared with a plain one."""
    return bool(first_step(engine).looks)


def param_cuts(engine: Any) -> list[torch.Tensor]:
    """The memory of this rank's cuts of whole parameters at ZeRO stage 3."""
    return list(param_sync(engine)._all_cuts.tensors)


def memory_by_kind(engine: Any) -> dict[Any, int]:
    """Bytes by kind; what two kinds share counts for the first."""
    found: dict[Any, int] = {}
    seen: set[int] = set()
    for kind, tensors in engine.optimizer.offloading.memory().items():
        storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
        found[kind] = sum(size for key, size in storages.items() if key not in seen)
        seen |= storages.keys()
    return found
