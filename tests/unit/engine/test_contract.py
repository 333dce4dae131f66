"""The list of what is taken from DeepSpeed: that it is whole, that it holds, and what happens where it does not.

``OTHER_DEEPSPEEDS=<folder>[:<folder>...]`` walks it against more releases than the installed one; see
tests/contract_releases.py for what a folder holds.
"""

import ast
import copy
import functools
import os
import re
import subprocess
import sys
import threading
import time
from dataclasses import replace

import deepspeed
import pytest
import torch
from deepspeed.moe import utils as moe_utils
from deepspeed.runtime import config as config_module
from deepspeed.runtime.base_optimizer import ZeROOptimizer
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.pipe.topology import PipelineParallelGrid
from deepspeed.runtime.zero import utils as zero_utils

from ds_layerwise.engine.contract import contract, patches
from ds_layerwise.engine.contract.contract import CONTRACT, ON_INSTANCES
from ds_layerwise.engine.engine_hooks import WRAPS
from ds_layerwise.engine.register import register, unregister
from ds_layerwise.errors import ConfigError
from ds_layerwise.instance_patches import patch
from ds_layerwise.zero.optimizer import LayerWiseZeroOptimizer
from ds_layerwise.zero.setup import param_owner
from tests.contract_releases import ROOT, walk
from tests.support import deepspeed_names, foreign_writes, lookup, torch_names
from tests.support.deepspeed_names import USED, Used, is_asked_for, is_attribute
from tests.support.rooms import rooms
from tests.support.versions import needs

pytestmark = rooms("contract", "register", "patches", "instance_patches")

TREES = {path: ast.parse(path.read_text()) for path in sorted((ROOT / "ds_layerwise").rglob("*.py"))
         if path.name != "contract.py"}
KNOWN = {name.path for name in (*CONTRACT, *ON_INSTANCES, *USED)}
ENGINE = "deepspeed.runtime.engine.DeepSpeedEngine"
BASE = "deepspeed.runtime.base_optimizer.ZeROOptimizer"

#: As what the package has objects of DeepSpeed at hand, wherever it has one.
AT_HAND = {
    "engine": ENGINE,
    "engine._config": "deepspeed.runtime.config.DeepSpeedConfig",
    "engine.checkpoint_engine": "deepspeed.runtime.checkpoint_engine.checkpoint_engine.CheckpointEngine",
    "engine.engine_timers": "deepspeed.runtime.engine.EngineTimers",
    "engine.mpu": "deepspeed.runtime.pipe.topology.PipelineParallelGrid",
    "grid": "deepspeed.runtime.pipe.topology.PipelineParallelGrid",
    "accelerator": "deepspeed.accelerator.abstract_accelerator.DeepSpeedAccelerator",
    "get_accelerator()": "deepspeed.accelerator.abstract_accelerator.DeepSpeedAccelerator",
    "engine._config.zero_config": "deepspeed.runtime.zero.config.DeepSpeedZeroConfig",
    "engine._config.zero_config.offload_optimizer":
        "deepspeed.runtime.zero.offload_config.DeepSpeedZeroOffloadOptimizerConfig",
    "engine._config.bfloat16_config": "deepspeed.runtime.precision_config.DeepSpeedBF16Config",
    "self._backward_hook_state": "deepspeed.runtime.base_optimizer.BackwardHookStateManager",
}


#: As what it hands them to :func:`.instance_patches.patch`.
PATCHED = AT_HAND | {
    "checkpoint_engine": AT_HAND["engine.checkpoint_engine"],
    "module": "deepspeed.runtime.pipe.module.PipelineModule",
    "param": "deepspeed.runtime.zero.partition_parameters.Init",
    "self.client": "torch.optim.Optimizer",
}


def imported(tree):
    """The imports from DeepSpeed, by the name that a file has for them."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "deepspeed":
            found.update({alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names})
        elif isinstance(node, ast.Import):
            found.update({alias.asname or alias.name: alias.name for alias in node.names
                          if alias.name.split(".")[0] == "deepspeed"})
    return found


def read_of(scope, objects):
    """The names that ``scope``, a file or a function of it, reads of ``objects``, under whatever names it has them."""
    called = {}
    for node in ast.walk(scope) if isinstance(scope, ast.FunctionDef) else ():
        if isinstance(node, ast.Assign):
            target = node.targets[0]
            pairs = zip(target.elts, getattr(node.value, "elts", ())) if isinstance(target, ast.Tuple) else (
                (target, node.value), )
            called |= {each.id: value for each, value in pairs if isinstance(each, ast.Name)}

    def said(node):
        text = ast.unparse(node)
        first, _, rest = text.partition(".")
        if text not in objects and first in called and ast.unparse(called[first]).split(".")[0] != first:
            return said(called[first]) + f".{rest}" * bool(rest)
        return text

    return {f"{objects[owner]}.{node.attr}" for node in ast.walk(scope)
            if isinstance(node, ast.Attribute) and (owner := said(node.value)) in objects}


def identifiers(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
        for field in ("id", "attr", "name"):
            if isinstance(getattr(node, field, None), str):
                yield getattr(node, field)


def test_every_import_is_on_the_list_and_no_other():
    found = {path for tree in TREES.values() for path in imported(tree).values()}
    assert found - {"deepspeed"} == {name.path for name in USED if name.kind == "imported"}


@pytest.mark.parametrize("path", TREES, ids=[str(path.relative_to(ROOT)) for path in TREES])
def test_every_name_that_is_read_is_on_the_list(path):
    tree = TREES[path]
    floor = path.relative_to(ROOT).parts[1]
    objects = imported(tree) | (AT_HAND if floor in ("engine", "zero", "parallel") else {})
    objects |= {name: AT_HAND[name] for name in ("accelerator", "get_accelerator()")}
    scopes = [tree, *(node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))]
    read = {name for scope in scopes for name in read_of(scope, objects)}
    # What this package has put there, what everything has, and of a logger everything is Python's.
    ours = re.compile(r".*(\._layerwise_\w+|\.__dict__|\.__name__|\.__file__|\.logger\.\w+|OffloadStateTypeEnum\.\w+)")
    assert {name for name in read if not ours.fullmatch(name)} <= KNOWN


def test_every_inherited_name_is_on_the_list():
    """The class that takes the place of DeepSpeed's own asks these of itself, and has them from there."""
    bases = [base for base in LayerWiseZeroOptimizer.__mro__ if base.__module__.startswith("ds_layerwise.")]
    asked = {"self": set(), "super()": set()}
    for tree in (TREES[ROOT / f"{base.__module__.replace('.', '/')}.py"] for base in bases):
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and (owner := ast.unparse(node.value)) in asked:
                asked[owner].add(node.attr)
    own = {name for base in bases for name in vars(base)} | set(vars(object))
    asked_of_it = asked["self"] - own | asked["super()"] - set(vars(object))
    found = {name for name in asked_of_it if hasattr(ZeROOptimizer, name) and not name.startswith("__")}
    assert "queue_post_backward_callback" in found
    assert {f"{BASE}.{name}" for name in found} <= KNOWN


def test_every_name_that_is_replaced_on_an_object_is_on_the_list_and_no_other():
    calls = [node for tree in TREES.values() for node in ast.walk(tree)
             if isinstance(node, ast.Call) and ast.unparse(node.func) == "patch"]
    found = {f"{PATCHED[ast.unparse(call.args[0])]}.{each.arg}" for call in calls for each in call.keywords}
    assert found - KNOWN == torch_names.ON_INSTANCES.keys()
    assert {name.path for name in ON_INSTANCES} <= found


def test_every_write_to_an_object_of_others_is_on_the_list_and_no_other():
    """A name that others call is replaced by ``patch``; for a value, say in LISTED why it is set."""
    own = foreign_writes.declared(TREES.values())
    assert set().union(*(foreign_writes.foreign(tree, own) for tree in TREES.values())) == foreign_writes.LISTED.keys()


@pytest.mark.parametrize("line, written", [
    ("engine.step = ours", "engine.step"),
    ("del engine.step", "engine.step"),
    ("self._engine().step, x = ours, 1", "self._engine().step"),
    ("for engine.step in steps: pass", "engine.step"),
    ("torch.nn.functional.linear = ours", "torch.nn.functional.linear"),
    ("setattr(torch.nn, 'Linear', ours)", "torch.nn.{'Linear'}"),
    ("object.__setattr__(config, name, 1)", "config.{name}"),
    ("param.__setattr__('grad', 1)", "param.{'grad'}"),
    ("delattr(param, 'grad')", "param.{'grad'}"),
    ("vars(engine)['step'] = ours", "engine.{'step'}"),
    ("engine.__dict__.update(step=ours)", "engine.{*}"),
    ("engine.__dict__ |= ours", "engine.__dict__"),
    ("if (members := vars(engine)): members |= ours", "engine.{*}"),
    ("self.__dict__.update(vars(other))", "self.{*}"),
    ("members = vars(writer)\nmembers.pop('save')", "writer.{'save'}"),
    ("sys.modules['torch.fx'] = ours", "sys.modules.{'torch.fx'}"),
    # Neither an attribute that classes of this package lack, nor another object, is taken for ours.
    ("load.step = ours", "load.step"),
    ("engine.alone = ours", "engine.alone"),
])
def test_a_write_is_seen_however_it_is_written(line, written):
    assert foreign_writes.foreign(ast.parse(line), {"alone"}) == {written}


@pytest.mark.parametrize("line", [
    "load.alone = True", "self.step = ours", "object.__setattr__(self, 'a', 1)", "vars(engine).get('a')", "a[0] = 1",
    "engine.list.update(a=1)"])
def test_own_objects_and_other_statements_are_left_alone(line):
    assert not foreign_writes.foreign(ast.parse(line), {"alone"})


class TestAPatchOfAnObject:
    """A patch replaces the names that an object has of its own, and those of its class."""

    class Writer:
        def __init__(self):
            self.own = 1

        def of_class(self):
            return 2

    def test_it_lasts_until_it_is_closed(self):
        writer = self.Writer()
        with patch(writer, own=3) as undo:
            with patch(writer, own=4, of_class=lambda: 5):
                assert (writer.own, writer.of_class()) == (4, 5)
            assert (writer.own, writer.of_class()) == (3, 2)
            undo.push(patch(writer, of_class=lambda: 6))
            assert writer.of_class() == 6
        assert vars(writer) == {"own": 1} and writer.of_class() == 2

    def test_a_release_that_lacks_the_name_is_refused_in_words(self):
        writer = self.Writer()
        with pytest.raises(ConfigError, match=r"Writer\.gone is not there, and ds_layerwise replaces it; install "):
            patch(writer, own=3, gone=4)
        assert vars(writer) == {"own": 1}


def test_the_walk_sees_names_that_are_read():
    code = ast.parse("def f(engine):\n  config, b = engine._config, 1\n  zero = config.zero_config\n  zero.a\n  b.c\n"
                     "def g(engine):\n  zero.d\n  engine.e\n  engine._config.h")
    read = {name.split(".")[-1] for scope in code.body for name in read_of(scope, AT_HAND)}
    assert read == {"_config", "zero_config", "a", "e", "h"}


def test_every_entry_is_used():
    written = {name for tree in TREES.values() for name in identifiers(tree)}
    replaced = {node.arg for tree in TREES.values() for node in ast.walk(tree) if isinstance(node, ast.keyword)}
    assert {name.key for name in (*CONTRACT, *USED)} <= written | replaced


def test_an_entry_is_there_once_and_what_is_wrapped_is_found_by_its_name():
    every = (*CONTRACT, *ON_INSTANCES, *USED)
    assert len({(name.path, getattr(name, "kind", None)) for name in every}) == len(every)
    wrapped = [name.key for name in CONTRACT if name.parameters is not None]
    assert sorted(wrapped) == sorted(WRAPS)
    assert contract.resolve("load_checkpoint") == (DeepSpeedEngine, "load_checkpoint")
    assert contract.resolve("get_zero_config") == (config_module, "get_zero_config")


def test_the_supported_releases_are_those_of_setup_cfg():
    assert f"deepspeed>={contract.OLDEST},<{contract.BELOW}\n" in (ROOT / "setup.cfg").read_text()


def test_the_installed_release_has_all_of_it():
    assert walk(None) == (deepspeed.__version__, [])


@pytest.mark.may_skip("more releases have to be installed beside this one")
def test_other_releases_have_all_of_it():
    folders = [folder for folder in os.environ.get("OTHER_DEEPSPEEDS", "").split(os.pathsep) if folder]
    if not folders:
        pytest.skip("OTHER_DEEPSPEEDS names no folder with another release")
    walked = dict(walk(folder) for folder in folders)
    assert walked == {release: [] for release in walked} and len(walked) == len(folders)


@pytest.fixture
def unregistered():
    unregister()
    yield
    unregister()


def snapshot():
    """Everything that DeepSpeed's modules and classes hold, lists by value."""
    found = {}
    for module_name, module in list(sys.modules.items()):
        if module_name.split(".")[0] == "deepspeed" and module is not None:
            owners = [module, *(value for value in vars(module).values() if isinstance(value, type)
                                and value.__module__ == module_name)]
            found.update({(module_name, owner.__name__, name): copy.copy(value) if isinstance(value, list) else value
                          for owner in owners for name, value in list(vars(owner).items())})
    return found


def changed(before, after):
    return [key for key in before.keys() | after.keys()
            if before.get(key) is not after.get(key) and not (
                isinstance(before.get(key), list) and before[key] == after.get(key))]


def test_nothing_is_patched_where_names_are_missing_and_one_error_names_them_all(unregistered, monkeypatch):
    def _broadcast_model(self, source_rank):
        """Another signature."""

    monkeypatch.delattr(DeepSpeedEngine, "_configure_zero_optimizer")
    monkeypatch.delattr(DeepSpeedEngine, "zero_grad")
    monkeypatch.setattr(DeepSpeedEngine, "_broadcast_model", _broadcast_model)
    monkeypatch.setattr(zero_utils, "ZERO_SUPPORTED_OPTIMIZERS", ())
    monkeypatch.delattr(config_module, "DEEPSPEED_OPTIMIZERS")
    before = snapshot()
    with pytest.raises(ConfigError) as raised:
        register()
    assert not changed(before, snapshot()) and not patches.is_registered()
    expected = [
        f"{ENGINE}._configure_zero_optimizer is not there",
        f"{ENGINE}.zero_grad is not there",
        f"{ENGINE}._broadcast_model takes (self, source_rank), not (self)",
        "deepspeed.runtime.zero.utils.ZERO_SUPPORTED_OPTIMIZERS is not a list",
        "deepspeed.runtime.config.DEEPSPEED_OPTIMIZERS is not there",
    ]
    first, *lines, last = str(raised.value).splitlines()
    assert sorted(line.strip() for line in lines) == sorted(expected)
    assert first == f"DeepSpeed {deepspeed.__version__} is not what ds_layerwise knows (>=0.19.4,<0.20):"
    assert last == "nothing was patched; install deepspeed==0.19.8, or report this list"
    monkeypatch.undo()
    register()
    assert DeepSpeedEngine.zero_grad.__wrapped__


@needs(f"deepspeed=={contract.NEWEST}", "releases ask for different names")
def test_the_walk_names_what_this_deepspeed_lacks(monkeypatch):
    def allreduce_gradients(self, bucket_size=0):
        """It asks an optimizer for nothing."""

    assert not deepspeed_names.missing(deepspeed.__version__)
    monkeypatch.setattr(DeepSpeedEngine, "use_node_local_storage", property(lambda self: False))
    monkeypatch.setattr(DeepSpeedEngine, "allreduce_gradients", allreduce_gradients)
    monkeypatch.delattr(DeepSpeedEngine, "is_gradient_accumulation_boundary")
    monkeypatch.delattr(PipelineParallelGrid, "get_stage_id")
    monkeypatch.delattr(moe_utils, "is_moe_param")
    monkeypatch.setitem(sys.modules, "deepspeed.utils.bwc", None)
    assert set(deepspeed_names.missing(deepspeed.__version__)) == {
        f"{ENGINE}.use_node_local_storage cannot be called",
        f"{ENGINE}.reduce_gradients is not asked for",
        f"{ENGINE}.is_gradient_accumulation_boundary is not there",
        "deepspeed.runtime.pipe.topology.PipelineParallelGrid.get_stage_id is not there",
        "deepspeed.moe.utils.is_moe_param is not there",
        *(f"deepspeed.utils.bwc.{name} is not there, as deepspeed.utils.bwc is not there" for name in (
            "bwc_pipeline_parallel_world_size", "bwc_tensor_model_parallel_group",
            "bwc_tensor_model_parallel_world_size")),
    }


def test_a_missing_name_leaves_the_others_alone(unregistered, monkeypatch):
    before = snapshot()
    for name in (*CONTRACT, *ON_INSTANCES):
        with monkeypatch.context() as patch:
            patch.delattr(*name.place())
            with pytest.raises(ConfigError, match=f"(?s)\n  {re.escape(name.path)} is not there\n.*nothing was patch"):
                register()
    assert not changed(before, snapshot())


@pytest.mark.parametrize("gone", ["DeepSpeedEngine._save_checkpoint", "utils.is_moe_param"])
def test_nothing_is_patched_before_all_is_imported(gone):
    code = f"""if True:
        import ds_layerwise
        from deepspeed.moe import utils
        from deepspeed.runtime import config
        from deepspeed.runtime.engine import DeepSpeedEngine
        del {gone}
        before, known = dict(vars(DeepSpeedEngine)), list(config.DEEPSPEED_OPTIMIZERS)
        for _ in range(2):
            try:
                ds_layerwise.register()
            except ds_layerwise.ConfigError as error:
                said = str(error)
                assert {gone.split(".")[-1]!r} in said and "nothing was patched" in said, said
            else:
                raise SystemExit("registered")
            ds_layerwise.unregister()
        assert dict(vars(DeepSpeedEngine)) == before and config.DEEPSPEED_OPTIMIZERS == known
    """
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


class TestASecondCall:

    def test_it_changes_nothing(self, unregistered):
        register()
        before = snapshot()
        register()
        assert not changed(before, snapshot())

    def test_a_function_that_was_put_back_is_wrapped_again(self, unregistered, monkeypatch):
        original = DeepSpeedEngine.save_checkpoint
        register()
        before = snapshot()
        DeepSpeedEngine.save_checkpoint = original
        zero_utils.ZERO_SUPPORTED_OPTIMIZERS.pop()
        config_module.DEEPSPEED_OPTIMIZERS.remove("layerwise")
        register()
        assert not changed(before, snapshot())
        assert config_module.DEEPSPEED_OPTIMIZERS.count("layerwise") == 1
        DeepSpeedEngine.save_checkpoint = original
        unregister()
        assert DeepSpeedEngine.save_checkpoint is original

    def test_a_wrapper_of_another_package_that_shows_ours_may_stay(self, unregistered, monkeypatch):
        register()
        ours = DeepSpeedEngine.save_checkpoint

        @functools.wraps(ours)
        def logged(*args, **kwargs):
            return ours(*args, **kwargs)

        with monkeypatch.context() as patch:
            patch.setattr(DeepSpeedEngine, "save_checkpoint", logged)
            register()
            assert DeepSpeedEngine.save_checkpoint is logged
            with pytest.raises(ConfigError, match="^DeepSpeedEngine.save_checkpoint was replaced after"):
                unregister()
            assert DeepSpeedEngine.save_checkpoint is logged and patches.is_registered()

    def test_a_replaced_function_is_named(self, unregistered, monkeypatch):
        register()
        with monkeypatch.context() as patch:
            patch.setattr(DeepSpeedEngine, "_configure_zero_optimizer", lambda self, optimizer: None)
            patch.setattr(config_module, "get_zero_config", lambda given: None)
            patch.delattr(DeepSpeedEngine, "zero_use_cpu_optimizer")
            for call in (register, unregister):
                with pytest.raises(ConfigError) as raised:
                    call()
                said, _, way_out = str(raised.value).partition(" were replaced after ds_layerwise.register()")
                assert set(said.split(", ")) == {
                    "DeepSpeedEngine._configure_zero_optimizer", "deepspeed.runtime.config.get_zero_config",
                    "DeepSpeedEngine.zero_use_cpu_optimizer"}
                assert "undo that" in way_out
        register()


class TestSeveralAtOnce:

    def test_threads_that_register_at_once_wrap_once(self, unregistered, monkeypatch):
        before, wrapped, barrier, errors = snapshot(), patches._wrapped, threading.Barrier(4), []

        def slowly(*args, **kwargs):
            # Others get to run between the look at what is wrapped and the wrapping.
            time.sleep(0.002)
            return wrapped(*args, **kwargs)

        monkeypatch.setattr(patches, "_wrapped", slowly)

        def call():
            try:
                barrier.wait()
                register()
            except BaseException as error:  # a thread's own would be lost
                errors.append(error)

        threads = [threading.Thread(target=call) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not errors
        assert not hasattr(DeepSpeedEngine.zero_grad.__wrapped__, "__wrapped__")
        assert config_module.DEEPSPEED_OPTIMIZERS.count("layerwise") == 1
        unregister()
        assert not changed(before, snapshot())

    def test_a_thread_that_unregisters_waits_for_one_that_registers(self, unregistered, monkeypatch):
        before, wrapped, under_way = snapshot(), patches._wrapped, threading.Event()

        def slowly(*args, **kwargs):
            under_way.set()
            time.sleep(0.002)
            return wrapped(*args, **kwargs)

        monkeypatch.setattr(patches, "_wrapped", slowly)
        thread = threading.Thread(target=register)
        thread.start()
        assert under_way.wait(60)
        unregister()
        thread.join()
        assert not patches.is_registered() and not changed(before, snapshot())

    @pytest.mark.parametrize("change", [register, unregister])
    def test_an_engine_that_is_collected_meanwhile_waits(self, unregistered, monkeypatch, change):
        """The last engine of all goes while what it needs is looked at."""
        class Engine:
            module = torch.nn.Linear(2, 2)

        before = snapshot()
        register()
        engine = Engine()
        patches.engines.add(engine)
        param_owner.take(engine.module.parameters(), engine)
        engines = [engine]
        del engine
        unregister()
        assert patches._patches and all(patch.for_life for patch in patches._patches.values())
        if change is unregister:
            register()
        room, name = (patches._Patch, "now") if change is register else (patches, "is_trained")
        original = getattr(room, name)

        def look(it):
            seen = original(it)
            if engines:
                param_owner.release(Engine.module.parameters())
                engines.clear()
            return seen

        monkeypatch.setattr(room, name, look)
        change()
        assert not engines and patches.is_registered() is (change is register)
        assert bool(changed(before, snapshot())) is (change is register)
        unregister()
        assert not changed(before, snapshot())

    @pytest.mark.may_skip("accelerate is not installed")
    @pytest.mark.parametrize("first", ["accelerate", "ds_layerwise"])
    def test_whoever_is_imported_first(self, first):
        pytest.importorskip("accelerate")
        names = ["accelerate.utils.deepspeed", "ds_layerwise"]
        code = f"""if True:
            from importlib import import_module
            import sys
            for name in {names if first == "accelerate" else names[::-1]}:
                import_module(name)
                if name == "ds_layerwise":
                    import ds_layerwise
                    ds_layerwise.register()
            from deepspeed.runtime import config
            from deepspeed.runtime.engine import DeepSpeedEngine
            from ds_layerwise.engine.engine_hooks import WRAPS
            from ds_layerwise.engine.contract import contract
            for key in WRAPS:
                wrapped = getattr(*contract.resolve(key))
                # What others hold by name is what is called.
                held = [f"{{name}}.{{attribute}}" for name, module in list(sys.modules.items())
                        if name.split(".")[0] in ("deepspeed", "accelerate") and module is not None
                        for attribute, value in list(vars(module).items()) if value is wrapped.__wrapped__]
                defined = f"{{wrapped.__wrapped__.__module__}}.{{key}}"
                assert not set(held) - {{defined}}, held
            ds_layerwise.unregister()
            assert not hasattr(DeepSpeedEngine.zero_grad, "__wrapped__")
        """
        result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
        assert result.returncode == 0, result.stdout + result.stderr


def test_releases_are_those_of_the_change():
    name = Used("deepspeed.c", "read", since="0.19.2", until="0.19.10")
    assert [release for release in ("0.18.9", "0.19.1", "0.19.2", "0.19.9", "0.19.9+abc", "0.19.10", "0.20")
            if name.is_in(release)] == ["0.19.2", "0.19.9", "0.19.9+abc"]


@pytest.mark.parametrize("renamed", [False, True])
def test_a_function_with_a_new_name_is_found_in_releases_of_before_and_after(unregistered, monkeypatch, renamed):
    old, new = f"{ENGINE}._configure_zero_optimizer", f"{ENGINE}._renamed"
    monkeypatch.setattr(contract, "CONTRACT", tuple(replace(name, path=new, was=old) if name.path == old else name
                                                    for name in CONTRACT))
    original = DeepSpeedEngine._configure_zero_optimizer
    if renamed:
        monkeypatch.setattr(DeepSpeedEngine, "_renamed", original, raising=False)
        monkeypatch.delattr(DeepSpeedEngine, "_configure_zero_optimizer")
    name = "_renamed" if renamed else "_configure_zero_optimizer"
    register()
    assert getattr(DeepSpeedEngine, name).__wrapped__ is original
    unregister()
    assert getattr(DeepSpeedEngine, name) is original


@pytest.mark.parametrize("function, differs", [
    (lambda self, a: None, False),
    (lambda self, a, b=1, *c, d=2, **e: None, False),
    (lambda *args, **kwargs: None, False),
    (lambda self, b: None, True),
    (lambda a, self: None, True),
    (lambda self: None, True),
    (lambda self, a, b: None, True),
    (lambda self, a, *, b: None, True),
    (lambda self, *args, **kwargs: None, True),
    (lambda *args: None, True),
    (7, True),
])
def test_a_signature_differs_unless_it_takes_the_same_arguments(function, differs):
    assert (contract.difference(function, ("self", "a")) is not None) is differs


def test_an_attribute_of_instances_is_found_in_the_code_that_sets_it():
    def hidden(function):
        return lambda *args: function(*args)

    class Base:
        def __init__(self):
            self.of_base = self.only_read

    class Derived(Base):
        @hidden
        def decorated(self):
            self.__dict__["by_dict"] = 1
            self.other["by_item"] = 1

        @property
        def computed(self):
            def inner():
                self.nested = 1
            return inner

    found = {name for name in ("of_base", "by_dict", "computed", "nested", "by_item", "only_read", "nowhere")
             if is_attribute(Derived, name)}
    assert found == {"of_base", "by_dict", "computed", "nested"}
    assert is_asked_for(Derived, "only_read") and not is_asked_for(Derived, "nowhere")


def test_a_broken_import_is_said_as_it_is(tmp_path, monkeypatch):
    (tmp_path / "layerwise_probe.py").write_text("import layerwise_nowhere")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(lookup.Absent, match="layerwise_probe cannot be imported: No module named 'layerwise_nowhere'"):
        lookup.find("layerwise_probe.something")
