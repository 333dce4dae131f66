"""Writes to objects of others, as the source has them: attributes that are set or deleted on what is not this
package's own. They replace names that others call, or change what others read, so each kind is on a list."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Set
from typing import Any

#: Expressions for objects of this package, beside ``self``.
OURS = frozenset("""
    _Changes _Kept checkpointing checkpointing.load load local made optimizer.checkpointing report
    run.progress.state run.scaling seat self._load self.progress.state self.reduced self.scaling step""".split())

#: The writes to others that do not go through :func:`ds_layerwise.instance_patches.patch`, and the reason for each.
#: A name in braces is computed.
LISTED = {
    # DeepSpeed: values that its own code sets on these objects, too.
    "config._param_dict": "the config without this package's sections, or without those of training",
    "config.global_rank": "as its own constructor sets it for the check of batch sizes",
    "config.world_size": "the same",
    "config.offload_optimizer.ratio": "the part of states on the host, which DeepSpeed's own stages do not know",
    "config.optimizer_name": "an engine without an optimizer",
    "config.optimizer_params": "the same",
    "engine._autoep_folding_spec": "None: gradients of AutoEP beside AutoTP are ours to correct",
    "engine.basic_optimizer": "as its own hook sets it",
    "engine.micro_steps": "counted again after an interrupted step",
    "engine._running_engine_step": "the same",
    "engine._unmanaged_backward_count": "the same",
    "engine.mpu": "a mesh of sequences; none while DeepSpeed makes what fetches parameters at stage 3",
    "param.ds_secondary_tensor": "second copies of old weights are dropped, as its own optimizer drops them",
    "engine.save_non_zero_checkpoint": "the rank that writes the model's file",
    "engine.{*}": "counts, as they were before a load that failed",
    "engine.module.{UNIVERSAL_CHECKPOINT_INFO}": "DeepSpeed's converter asks the model's file for it",
    "factory._writer": "a writer that has failed, forgotten",
    "writer.commit_info": "the same",
    "self._backward_hook_state.backward_active_depth": "forgets a pass that an exception has ended",
    "state.hooks_fired_this_backward": "the same",
    "state.post_backward_callback_queued": "the same",
    # Where DeepSpeed's functions look on a parameter for its optimizer; all are ``asked`` in deepspeed_names.py.
    "param._z3_optimizer": "state access at stage 3",
    "param.{PARAM_COMM_DTYPE_ATTR_NAME}": "taken away with the engine that has set it",
    "param.{PART_SHAPES}": "beside Megatron's marks, which say of no part how large the others are",
    "param.{*}": "state access at stages 1 and 2",
    "param.{key}": "state access, taken away",
    # torch: attributes that are there to be set.
    "param.data": "the memory of a parameter",
    "self._cut(slot.name).data": "the same",
    "self._params[name].data": "the same",
    "param.grad": "a gradient",
    "self._params[name].grad": "the same",
    "cuda.{name}": "precision of products, put back after a step",
    "matmul.fp32_precision": "the same",
    "weakref.finalize(engine, _put_back_soon).atexit": "Python's",
    "weakref.finalize(self, MEASURED.forget).atexit": "Python's",
    "optimizer.defaults": "an optimizer without parameters, on which a schedule is tried",
    "optimizer.param_groups": "the same",
    # A script's optimizer, as torch's schedulers mark and read it.
    "hooked._wrapped_by_lr_sched": "no warning without need",
    "self.client.{'_opt_called'}": "the same",
    # Classes and modules; engine/contract/patches.py keeps what was there, and the contract lists the names.
    "self.owner.{self.name}": "engine/contract/patches.py itself",
    "target.{*}": "instance_patches.py itself",
    # Python and rich.
    "error.{AGREED}": "marks an error as known to all ranks",
    "still_there.daemon": "a thread",
    "sys.argv": "the command line of the script that runs",
    "sys.excepthook": "the last words of a rank",
    "column.min_width": "rich's tables", "column.no_wrap": "the same", "column.width": "the same",
    "part.columns": "the same",
    # Objects of this package, by computed names.
    "self.{'_hooks'}": "destroyed twice",
    "kind.{name}": "methods of an optimizer of this package, which compilers do not trace",
    "optimizer.{name}": "an optimizer that is retired",
}

_CHANGES = {"update", "pop", "setdefault", "__setitem__", "__delitem__"}
_SETTERS = {"setattr", "delattr", "__setattr__", "__delattr__"}


def writes(tree: ast.Module) -> Iterator[str]:
    """Yield each attribute that code sets or deletes on another object than ``self``, as ``object.name``."""
    held = _held_namespaces(tree)
    node: Any
    owner: str | None
    for node in ast.walk(tree):
        changes = isinstance(getattr(node, "ctx", None), (ast.Store, ast.Del))
        if isinstance(node, ast.Attribute) and changes:
            if (owner := ast.unparse(node.value)) not in ("self", "cls"):
                yield f"{owner}.{node.attr}"
        elif isinstance(node, ast.Subscript) and changes:
            if owner := _owner_of_namespace(node.value, held):
                yield f"{owner}.{{{ast.unparse(node.slice)}}}"
        elif isinstance(node, ast.AugAssign) and (owner := held.get(ast.unparse(node.target))):
            yield f"{owner}.{{*}}"
        elif isinstance(node, ast.Call):
            within, _, function = ast.unparse(node.func).rpartition(".")
            if function in _SETTERS:
                arguments = [ast.unparse(argument) for argument in node.args]
                owner, name, *_ = arguments if within in ("", "object", "type") else [within, *arguments]
                if owner not in ("self", "super()"):
                    yield f"{owner}.{{{name}}}"
            elif function in _CHANGES and (owner := _owner_of_namespace(getattr(node.func, "value", node), held)):
                yield f"{owner}.{{{'*' if function == 'update' else ast.unparse(node.args[0])}}}"


def _owner_of_namespace(node: ast.expr, held: dict[str, str]) -> str | None:
    """Return the object whose ``__dict__`` this is; None if it is none. All of ``sys.modules`` are one such object."""
    text = ast.unparse(node)
    if text.startswith("vars(") or text.endswith(".__dict__"):
        return text.removeprefix("vars(").removesuffix(")").removesuffix(".__dict__")
    return text if text == "sys.modules" else held.get(text)


def _held_namespaces(tree: ast.Module) -> dict[str, str]:
    """Return the objects whose ``__dict__`` code has under a name of its own, by that name."""
    found = {}
    node: Any
    for node in ast.walk(tree):
        if isinstance(node, (ast.Assign, ast.AnnAssign, ast.NamedExpr)) and node.value:
            for target in getattr(node, "targets", None) or [getattr(node, "target")]:
                if isinstance(target, ast.Name) and (owner := _owner_of_namespace(node.value, {})):
                    found[target.id] = owner
    return found


def declared(trees: Iterable[ast.Module]) -> set[str]:
    """Return the attributes that classes of the package declare, or set on themselves."""
    found = set()
    node: Any
    for each in (node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)):
        for node in each.body:
            targets = getattr(node, "targets", None) or [getattr(node, "target", node)]
            found |= {getattr(target, "id", getattr(target, "name", "")) for target in targets}
        found |= {node.attr for node in ast.walk(each) if isinstance(node, ast.Attribute)
                  and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self"}
    return found


def foreign(tree: ast.Module, own: Set[str]) -> set[str]:
    """Return the writes to objects that are not of this package.

    Args:
        own: the attributes that :func:`declared` found.
    """
    found = set()
    for write in writes(tree):
        owner, _, name = write.rpartition(".")
        if owner not in OURS or name not in own:
            found.add(write)
    return found
