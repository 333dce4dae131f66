"""The private names of torch that this package uses, and the public function that it replaces.

A test looks up all of them in the installed torch, and checks that the package uses no other private names. If a
public name can replace one, remove its entry.
"""

from __future__ import annotations

#: Functions for lists of tensors, with one kernel for many. torch.optim is built on them; the public functions take one
#: tensor.
FOREACH = (
    "add add_ addcmul_ copy_ div_ lerp lerp_ mul mul_ neg_ norm sign_ sqrt sub sub_"
).split()

_GLOO = "torch.distributed.distributed_c10d.ProcessGroupGloo"

#: The reason for each private name. An attribute may exist only on instances, or be one that torch
#: looks for on objects.
PRIVATE = {
    **{f"torch._foreach_{name}": "one kernel for many tensors" for name in FOREACH},
    "torch._C._current_autograd_node": "tells whether a pass goes on from a tensor",
    "torch._C._current_graph_task_id": "tells whether a backward pass is running",
    "torch._C._will_engine_execute_node": "tells a call of torch.autograd.grad, which leaves nothing",
    "torch._dynamo.OptimizedModule": "what torch.compile makes of a module",
    "torch._dynamo.compiled_autograd.compiled_autograd_enabled": "tells that torch reports no end of a pass",
    "torch._dynamo.utils": "counters that tell whether torch has compiled something",
    "torch.Tensor._backward_hooks": "the order of hooks on a parameter",
    "torch.Tensor._make_wrapper_subclass": "pieces of a tensor for torch.distributed.checkpoint",
    "torch.Tensor._version": "tells that a script has written a weight",
    "torch.UntypedStorage._cdata": "tells tensors in one storage",
    "torch.autograd.Variable._execution_engine": "tells a pass that accumulates gradients",
    "torch.autograd.profiler._is_profiler_enabled": "costs nothing where no profiler runs",
    "torch.distributed.ProcessGroup._device_types": "devices with a backend",
    "torch.distributed.ProcessGroup._get_backend": "the backend, which has the timeout",
    f"{_GLOO}._Options._timeout": "the timeout of the world",
    f"{_GLOO}._set_default_timeout": "the same, for groups that DeepSpeed makes",
    "torch.distributed.checkpoint.planner_helpers.__create_write_items__": "pieces of a tensor",
    "torch.distributed.checkpoint.planner_helpers.__create_chunk_list__": "pieces of a tensor",
    "torch.distributed.checkpoint.utils.__get_tensor_shard__": "pieces of a tensor",
    "torch.distributed.distributed_c10d._get_default_store": "a note to ranks that have failed",
    "torch.nn.Module._modules": "the own children of a module by name, None included",
    "torch.nn.Module._parameters": "the own parameters of a module, without a parametrization",
    "torch.optim.Optimizer._optimizer_step_pre_hooks": "hooks of a script's optimizer",
    "torch.optim.lr_scheduler.LRScheduler._wrapped_by_lr_sched": "no warning without need",
    "torch.utils.cpp_extension._get_build_directory": "where DeepSpeed's operators are compiled",
    "torch.utils._python_dispatch": "tells tensors that hold other tensors",
}

#: The reason for each public function that is replaced while this backend is registered.
REPLACED = {
    "torch.nn.utils.clip_grad_norm_": "a script's own call finds no gradients here, and torch has "
    "no hook that says so",
}

#: The reason for each public method that is replaced on single objects.
ON_INSTANCES = {
    "torch.optim.Optimizer.step": "a script's own optimizer, which an engine trains with, does nothing by itself",
    "torch.optim.Optimizer.add_param_group": "the same",
    "torch.optim.Optimizer.load_state_dict": "the same",
    "torch.optim.Optimizer.state_dict": "the same",
    "torch.optim.Optimizer.__reduce_ex__": "the same",
}
