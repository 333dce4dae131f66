"""Sequence parallelism (Ulysses): the ranks that share a gradient.

The ranks of one sequence group each process a part of the same sequence. So a gradient is summed
over them and averaged over the sequences: it is the sum over data and sequence ranks, divided by
the number of sequence groups. Owners are also chosen from all those ranks.
"""

from __future__ import annotations

from typing import Any

from deepspeed.utils import groups

from ds_layerwise.errors import ConfigError
from ds_layerwise.ranks.comm import comm


class MeshGroups:
    """DeepSpeed's device mesh as an mpu. DeepSpeed asks an mpu first for the ranks of reductions.

    From the mesh alone it uses only the data axis; each rank of a sequence would then train on its
    own part.
    """

    #: The attribute by which DeepSpeed recognizes an mpu without model parallelism.
    initialize_sequence_parallel = None

    def __init__(self, mesh: Any) -> None:
        self._mesh = mesh

    def get_sequence_parallel_group(self) -> comm.Group:
        """Return the ranks that process parts of one sequence."""
        return self._mesh.get_group(mesh_dim="sequence_parallel")

    def get_sequence_parallel_world_size(self) -> int:
        """Return the number of parts of a sequence."""
        return comm.size_of(self.get_sequence_parallel_group())

    def get_sequence_parallel_rank(self) -> int:
        """Return the number of the part that this rank processes."""
        return comm.rank_of(self.get_sequence_parallel_group())

    def get_sequence_data_parallel_group(self) -> comm.Group:
        """Return all ranks: they share every gradient."""
        return groups._clone_world_group()

    def get_sequence_data_parallel_world_size(self) -> int:
        """Return the number of all ranks."""
        return comm.size_of(None)

    def get_sequence_data_parallel_rank(self) -> int:
        """Return the number of this rank among all ranks."""
        return comm.rank_of(None)

    def get_data_parallel_group(self) -> comm.Group:
        """Return the ranks that process the same part of different sequences."""
        return self._mesh.get_group(mesh_dim="data_parallel")

    def get_data_parallel_world_size(self) -> int:
        """Return the number of sequences that are processed at a time."""
        return comm.size_of(self.get_data_parallel_group())

    def get_data_parallel_rank(self) -> int:
        """Return the number of the sequence that this rank processes."""
        return comm.rank_of(self.get_data_parallel_group())

    def get_model_parallel_rank(self) -> int:
        """Return 0: no parameter is cut. DeepSpeed before 0.19.8 names files by it."""
        return 0

    def get_tensor_model_parallel_world_size(self) -> int:
        """Return 1: no parameter is cut."""
        return 1

    # Background writers of checkpoints ask for these.
    get_tensor_model_parallel_rank = get_pipeline_model_parallel_rank = get_model_parallel_rank
    get_pipeline_model_parallel_world_size = get_tensor_model_parallel_world_size

    def get_data_parallel_group_ranks(self) -> list[int]:
        """Return the ranks of :meth:`get_data_parallel_group`."""
        return list(comm.ranks_of(self.get_data_parallel_group()))


class WithoutParts:
    """An mpu of sequences as AutoEP reads it: DeepSpeed's own calls its sequences model
    parallelism, too, which AutoEP refuses.
    """

    def __init__(self, mpu: Any) -> None:
        self.get_sequence_parallel_world_size = mpu.get_sequence_parallel_world_size

    def get_tensor_model_parallel_world_size(self) -> int:
        """Return 1: no parameter is cut."""
        return 1


def is_ulysses(mpu: Any) -> bool:
    """Tell whether ``mpu`` has the groups of DeepSpeed's sequence parallelism, and no others."""
    return hasattr(mpu, "initialize_sequence_parallel") and hasattr(
        mpu, "get_sequence_data_parallel_group"
    )


def cuts_params(mpu: Any) -> bool:
    """Tell whether ``mpu``, None if there is none, cuts parameters over ranks."""
    return mpu is not None and not is_ulysses(mpu)


def check(engine: Any) -> None:
    """Refuse a configured size that differs from the groups of ``engine``.

    Raises:
        ConfigError: the average would be over another number of sequences than there are, or a key
            is not read.
    """
    given = engine._config._param_dict
    size = engine.sequence_parallel_size
    if size > 1 and engine.mpu is None:
        raise ConfigError(
            f"sequence groups of {size} are left from an earlier engine of this process, and "
            "DeepSpeed would average the gradients of this one with them; pass mesh_param again, "
            "or start a new process"
        )
    asked = given.get("sequence_parallel_size", size)
    if asked != size:
        raise ConfigError(
            f"sequence_parallel_size is {asked!r}, but the engine has sequence groups of {size}; "
            "set data_parallel_size, too, or give initialize() mesh_param=(data, sequence) or an "
            "mpu such as deepspeed.runtime.sequence_parallel.parallel_state_sp"
        )
    wanted = given.get("communication_data_type")
    read = given.get("seq_parallel_communication_data_type")
    if size > 1 and wanted not in (None, read or "fp32"):
        raise ConfigError(
            f"communication_data_type is {wanted!r}, which sequence parallelism does not read; set "
            "seq_parallel_communication_data_type instead"
        )


def num_sequences(engine: Any) -> float:
    """Return the number of ranks, or groups of ranks, with a batch of their own. A sum over all
    ranks is divided by it.
    """
    return comm.size_of(engine.seq_data_parallel_group) / int(engine.sequence_parallel_size)


def group_of(engine: Any) -> Any:
    """Return the group of the ranks that share a sequence with this one; None without sequence
    parallelism.
    """
    if engine.sequence_parallel_size == 1:
        return None
    return groups._get_sequence_parallel_group()
