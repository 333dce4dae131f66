"""Memory of layouts without recipes, from a number of bytes of state per element of whole and of split parameters; and
dispatched operations."""

from torch.utils._python_dispatch import TorchDispatchMode

from ds_layerwise.plan.forecast import memory


class Operations(TorchDispatchMode):
    """A context that counts dispatched operations in ``count``."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


def per_element(layout, whole_state_bytes=4, split_state_bytes=8):
    """Return a :data:`.plan.forecast.memory.StateBytes`; by default for Muon's momentum and Adam's two moments."""
    num_bytes = {slot.name: whole_state_bytes if bucket.whole else split_state_bytes
            for bucket in layout.buckets for slot in bucket.slots}
    return lambda name, numel: num_bytes[name] * numel


def memory_bytes(layout, *, whole_state_bytes=4, split_state_bytes=8, **kwargs):
    return memory.memory_bytes(layout, state_bytes=per_element(layout, whole_state_bytes, split_state_bytes), **kwargs)


def pieces_on_host(layout, rank, ratio, *, whole_state_bytes=4, split_state_bytes=8):
    return memory.pieces_on_host(layout, rank, ratio,
                                 state_bytes=per_element(layout, whole_state_bytes, split_state_bytes))
