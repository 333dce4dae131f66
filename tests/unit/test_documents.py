"""README.md and docs/ against the package: configs, commands, options, names, links, and what they say is shown."""

import argparse
import ast
import importlib
import importlib.util
import inspect
import json
import math
import re
import shlex
import subprocess
import sys
from configparser import ConfigParser
from pathlib import Path
from types import SimpleNamespace

import pytest
from deepspeed.launcher import runner
from deepspeed.ops.adam import FusedAdam
from deepspeed.runtime.constants import GRADIENT_CLIPPING_DEFAULT
from torch import nn
from torch.distributed import run as torchrun

import ds_layerwise
from ds_layerwise import cli
from ds_layerwise.config.overrides import Override
from ds_layerwise.config.sections import PRESETS, LayerWiseConfig, OptimizerConfig, params_model
from ds_layerwise.engine.contract.contract import CONTRACT
from ds_layerwise.errors import FOREIGN, ConfigError, RoutingError
from ds_layerwise.optimizers.recipe import KeptMoments, KeptMomentum, Recipe
from ds_layerwise.optimizers.registry import REGISTRY
from ds_layerwise.optimizers.rules.elementwise import AdamW
from ds_layerwise.optimizers.rules.muon_family import MatrixMomentum, Muon
from ds_layerwise.optimizers.rules.shampoo import Shampoo
from ds_layerwise.optimizers.rules.soap import KlSoap, Soap
from ds_layerwise.optimizers.rules.update_hooks import UpdateHooks
from ds_layerwise.tools.dry_run import DryRun
from ds_layerwise.zero.optimizer import LayerWiseZeroOptimizer
from tests import api
from tests.outputs import pages_with_outputs, with_outputs
from tests.support.documents import (
    DOCS,
    PAGES,
    ROOT,
    USERS_FILES,
    anchors_of,
    as_config,
    blocks,
    blocks_of,
    names_in,
    prose_of,
    tables_of,
)
from tests.support.rooms import rooms
from tests.support.routing import route_parameters

pytestmark = rooms("sections", "cli", "routing_rules")

#: The pages on optimizers.
OF_OPTIMIZERS = ("optimizers.md", "overrides.md", "optimizer_keys.md", "optimizer_family.md", "fewer_bits.md",
                 "qk_clip.md", "own_optimizers.md")

each_page = pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)


def each_block(language):
    return pytest.mark.parametrize("block", blocks(language), ids=str)


#: The parsers of our commands.
COMMANDS = next(action.choices for action in cli._parser()._actions if action.dest == "command")


def options_of(command):
    """The options of a command of ours, without --help, and without those that went."""
    shown = [action for action in COMMANDS[command]._actions if action.help != argparse.SUPPRESS]
    return {option for action in shown for option in action.option_strings} - {"-h", "--help"}


# --- code ------------------------------------------------------------------------------------------------------------


def test_every_block_is_in_a_language_that_is_tested():
    found = {block.language for path in PAGES for block in blocks_of(path)}
    assert found <= {"json", "python", "sh", "text", ""}
    # Drawings of a folder and of a path, in the page for those who work on the package.
    drawings = {block.page for path in PAGES for block in blocks_of(path) if not block.language}
    assert drawings <= {"docs/design.md", "docs/design_paths.md"}


#: Names as the pages' overrides have them.
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        layer = nn.ModuleDict({"proj": nn.Linear(32, 32, device="meta")})
        self.model = nn.ModuleDict({"embed": nn.Embedding(40, 8, device="meta"), "layers": nn.ModuleList([layer]),
                                    "norm": nn.RMSNorm(40, device="meta")})


@each_block("json")
def test_configs_are_planned(block, tmp_path):
    config, _ = as_config(block)
    (tmp_path / "ds.json").write_text(json.dumps(config))

    def plan():
        return DryRun.of(Model(), tmp_path / "ds.json", [2, 4] if "tensor_parallel" in config else [1, 2])

    for section, message in (("expert_parallel", "AutoEP finds no layers of experts|no MoE layers detected"),
                             ("tensor_parallel", "2 tensor-parallel parts as its class in transformers says")):
        if section in config:
            # All that comes before is in order.
            with pytest.raises(ConfigError, match=message):
                plan()
            return
    assert plan().run.optimizer == OptimizerConfig.from_section(config["optimizer"])
    assert [forecast.layout.world_size for forecast in plan().forecasts] == [1, 2]


#: Variables that pages set, and where they are read.
VARIABLES = {"THOROUGH": ROOT / "tests" / "conftest.py",
             "GLOO_SOCKET_IFNAME": None, "HEAD": None,
             **dict.fromkeys(("DS_ACCELERATOR", "LOCAL_SIZE", "TORCHDYNAMO_DISABLE"), ROOT / "tests" / "run.sh"),
             "OMP_NUM_THREADS": ROOT / "examples" / "venv.sh"}
#: Modules of other packages that a launcher starts on every rank.
TOOLS = {"llamafactory.launcher", "swift.cli.sft", "axolotl.cli.train", "trl.scripts.sft", "trl.scripts.dpo"}


@each_block("sh")
def test_commands_exist_with_their_options_and_files(block):
    lines = [line for line in block.text.replace("\\\n", " ").splitlines() if shlex.split(line, comments=True)]
    assert lines
    for line in lines:
        check_command(shlex.split(line, comments=True))


def check_command(words):
    while match := re.fullmatch(r"(\w+)=(.*)", words[0]):
        assert_variable(match[1])
        words = words[1:]
    program, *arguments = words
    checks = {"ds-layerwise": check_ours, "python": check_python, "bash": check_bash, "deepspeed": check_deepspeed,
              "torchrun": check_torchrun, "accelerate": check_accelerate, "pip": check_pip, "mkdir": lambda _: None,
              "srun": check_command, "git": check_git, ".": check_sourced,
              "export": lambda given: [assert_variable(each.partition("=")[0]) for each in given]}
    checks[program](arguments)


def check_sourced(arguments):
    assert arguments == [".venv/bin/activate"]


def check_git(arguments):
    if arguments[0] == "clone":
        # A recipe names it, too.
        recipes = (ROOT / "examples" / "recipes").glob("*/run.sh")
        assert any(f"git clone {arguments[1]}, " in path.read_text() for path in recipes)
        return
    assert arguments[0] == "apply"
    assert_file(arguments[1])


def assert_variable(name):
    assert name in VARIABLES and (VARIABLES[name] is None or name in VARIABLES[name].read_text()), name


def assert_file(name):
    assert name in USERS_FILES or (ROOT / name).is_file(), f"{name} is neither of the repository nor a user's"


def check_ours(arguments):
    options = cli._parser().parse_args(arguments)
    if options.command == "plan":
        assert_file(str(options.config))
        models = {path.stem for path in (ROOT / "ds_layerwise").rglob("models/*.json")}
        assert options.model in models or options.model in USERS_FILES
        return
    for path in (getattr(options, "path", None), getattr(options, "other", None), getattr(options, "out", None)):
        assert path is None or str(path) in USERS_FILES
    assert options.command != "consolidate" or options.config is None or str(options.config) in USERS_FILES


def check_python(arguments):
    if arguments[0] == "-c":
        tree = ast.parse(arguments[1])
        for line in tree.body:
            if isinstance(line, ast.ImportFrom):
                assert all(hasattr(importlib.import_module(line.module), each.name) for each in line.names)
    elif arguments[:2] == ["-m", "pytest"]:
        assert all((ROOT / each).exists() for each in arguments if each.startswith("tests/"))
    elif arguments[0] == "-m" and arguments[1].startswith("tests."):
        check_script(arguments[1].replace(".", "/") + ".py", *arguments[2:])
    elif arguments[0] == "-m":
        module = importlib.import_module(arguments[1])
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("sys.argv", arguments[1:])
            parsed = module.parse_arguments()
        assert str(parsed.input_folder) in USERS_FILES
    else:
        check_script(*arguments)


def check_script(name, *arguments):
    assert_file(name)
    if name in USERS_FILES:
        # What its author has said of its arguments: those that DeepSpeed's and Hugging Face's scripts have.
        allowed, files = {"--deepspeed_config", "--deepspeed"}, arguments
    else:
        calls = [node for node in ast.walk(ast.parse((ROOT / name).read_text())) if isinstance(node, ast.Call)]
        of_name = {getattr(call.func, "attr", ""): call for call in calls}
        allowed = {call.args[0].value for call in calls if getattr(call.func, "attr", "") == "add_argument"
                   and isinstance(call.args[0], ast.Constant)}
        allowed |= {"--deepspeed_config"} if "add_config_arguments" in of_name else set()
        files = arguments
    for argument in arguments:
        assert not argument.startswith("-") or argument in allowed, argument
    for argument in files:
        assert not argument.endswith((".json", ".py")) or argument in USERS_FILES or (ROOT / argument).is_file()


def check_bash(arguments):
    assert (ROOT / arguments[0]).is_file()
    if len(arguments) > 1:
        check_script("examples/train_gpt.py", *arguments[1:])


def check_deepspeed(arguments):
    parsed = runner.parse_args(arguments)
    if parsed.hostfile != runner.DLTS_HOSTFILE:
        assert parsed.hostfile in USERS_FILES
    if parsed.module:
        check_module(parsed.user_script, *parsed.user_args)
    else:
        check_script(parsed.user_script, *parsed.user_args)


def check_torchrun(arguments):
    parsed = torchrun.parse_args(arguments)
    # Without a place to meet, torchrun on each node waits for the other nodes at its own.
    assert parsed.nnodes in ("1:1", "1") or (parsed.rdzv_backend == "c10d" and parsed.rdzv_endpoint)
    check = check_module if parsed.module else check_script
    check(parsed.training_script, *parsed.training_script_args)


def check_accelerate(arguments):
    from accelerate.commands import launch
    assert arguments[0] == "launch"
    parsed = launch.launch_command_parser().parse_args(arguments[1:])
    assert parsed.use_deepspeed and parsed.deepspeed_config_file in USERS_FILES and parsed.module
    check_module(parsed.training_script, *parsed.training_script_args)


def check_module(module, script, *arguments):
    assert module == "ds_layerwise.run" and importlib.util.find_spec(module)
    if script == "-m":
        assert arguments[0] in TOOLS
        return check_script("train.py", *arguments[1:])
    check_script(script, *arguments)


def check_pip(arguments):
    setup = ConfigParser()
    setup.read(ROOT / "setup.cfg")
    assert arguments[0] == "install"
    for wanted in arguments[1:]:
        if match := re.fullmatch(r"\.(?:\[(\w+)\])?", wanted):
            assert match[1] is None or match[1] in setup["options.extras_require"]


@each_page
def test_commands_of_ours_in_a_sentence_exist(path):
    for name in names_in(prose_of(path)):
        if match := re.match(r"ds-layerwise ([a-z][a-z-]*)(.*)", name):
            if " | " in name:
                continue
            assert match[1] in COMMANDS
            assert set(re.findall(r"--[\w-]+", match[2])) <= options_of(match[1])


def test_the_page_of_the_command_line_has_every_command_and_option():
    text = prose_of(DOCS / "cli.md")
    parts = dict(zip(re.findall(r"^## (.+)$", text, flags=re.MULTILINE), re.split(r"^## .+$", text, flags=re.M)[1:]))
    assert {name for part in parts for name in names_in(part)} == set(COMMANDS)
    whole = (DOCS / "cli.md").read_text()
    for command in COMMANDS:
        for option in options_of(command):
            assert option in whole, f"{command} {option}"
    known = set().union(*map(options_of, COMMANDS))
    whole = whole.replace("\\\n", " ")
    ours = re.sub(r"^(?:deepspeed|torchrun) .* ds_layerwise\.\w+ ", "", whole, flags=re.MULTILINE)
    assert set(re.findall(r"(?<![\w-])--[\w-]+", ours)) <= known


# --- options ---------------------------------------------------------------------------------------------------------

#: Defaults that are other keys: what each is where the other is given, or nothing is.
FOLLOWS = {"lr": "`adam_lr`", "adam_lr": "`lr`, else 3e-4"}


def option_tables(kind, head):
    """Key and default, of every row of the tables on all pages with this column for a head."""
    found = []
    for path in PAGES:
        for header, *rows in tables_of(path):
            if header[:2] in ([head, "default"], ["key", "default"]):
                for keys, default, *_ in rows:
                    names = names_in(keys)
                    if set(names) <= set(kind.keys()):
                        found.append((path, names, default))
    return found


def assert_defaults(kind, head, defaults):
    tables = option_tables(kind, head)
    for path, names, default in tables:
        if names[0] in FOLLOWS and default == FOLLOWS[names[0]]:
            continue
        values = json.loads(f"[{default}]")
        assert len(values) == len(names), (path.name, names)
        for name, value in zip(names, values):
            assert value == json.loads(json.dumps(defaults[name])) and type(value) is not str or (
                value == defaults[name]), (path.name, name)
    return tables


def test_values_that_keep_adamw_as_it_was_are_the_defaults_of_deepspeed():
    block, = [block for block in blocks("json") if block.page == "docs/moving.md" and "decay_vectors" in block.text]
    params = json.loads(block.text)["optimizer"]["params"]
    theirs, ours = inspect.signature(FusedAdam).parameters, OptimizerConfig.from_section({}).model_dump()
    rows = {names_in(row[0])[0]: row[1:] for _, *rows in tables_of(DOCS / "moving.md") for row in rows
            if row[0].endswith(", if left out")}
    assert rows.pop("gradient_clipping") == [str(GRADIENT_CLIPPING_DEFAULT)] * 2
    assert rows.keys() == {"betas", "eps"} and params["decay_vectors"] is not ours["decay_vectors"]
    for key, (before, now) in rows.items():
        given = theirs[key].default
        assert json.loads(before) == params[key] == (list(given) if key == "betas" else given)
        assert json.loads(now) == (list(ours[key]) if key == "betas" else ours[key])
    assert theirs["weight_decay"].default == ours["weight_decay"] == 0


def tables_of_optimizers():
    return [table for name in OF_OPTIMIZERS for table in tables_of(DOCS / name)]


def test_presets_and_defaults_beside_those_of_emerging_optimizers_are_as_the_page_says():
    muon, = [rows for header, *rows in tables_of_optimizers() if header[0] == "of Muon"]
    config = OptimizerConfig.from_section({})
    ours = {**config.model_dump(), **config.matrix.model_dump()}
    for keys, there, preset, here in muon:
        names = names_in(keys)
        assert json.loads(f"[{there}]") == json.loads(f"[{preset}]") == [PRESETS["soap_muon_beyond"][n] for n in names]
        assert json.loads(f"[{here}]") == [ours[name] for name in names]
    soap, = [rows for header, *rows in tables_of_optimizers() if header[0] == 'of SOAP, here "kl_soap"']
    ours = {**config.model_dump(), **KlSoap().model_dump()}
    params = {"matrix_optimizer": "kl_soap"}
    for keys, _, here, written in soap:
        if names := names_in(keys):
            assert json.loads(f"[{here}]") == json.loads(json.dumps([ours[name] for name in names]))
        params |= json.loads(f"{{{written.strip('`')}}}")
    theirs = OptimizerConfig.from_section({"type": "LayerWise", "params": {"lr": 1e-3, **params}})
    assert theirs.matrix == KlSoap(precondition_frequency=1, lagged_basis=False, max_update_rms=0)
    assert (theirs.eps, theirs.weight_decay) == (1e-8, 0.1)


#: Settings that the page tells once for all optimizers.
OF_MANY = {*Recipe.keys(), *KeptMomentum.keys(), *KeptMoments.keys()}


def test_defaults_of_the_optimizer_are_as_the_pages_say():
    kind, config = params_model(Muon, AdamW, True), OptimizerConfig.from_section({"type": "LayerWise"})
    tables = assert_defaults(kind, "`optimizer.params`", {**config.model_dump(), **config.for_the_run()})
    whole = {name for path, names, _ in tables if path.name in OF_OPTIMIZERS for name in names}
    assert whole == set(kind.keys()) - {"matrix_optimizer"}
    assert any(path.name == "README.md" for path, *_ in tables)
    assert OptimizerConfig.from_section({"params": {"adam_lr": 0.5}}).lr == 0.5
    assert OptimizerConfig.from_section({"params": {"lr": 0.5, "muon_lr": 1}}).adam_lr == 0.5
    assert OptimizerConfig.from_section({}).adam_lr == 3e-4


def test_settings_of_other_matrix_optimizers_are_as_the_page_says():
    table, = [rows for header, *rows in tables_of_optimizers()
              if header[:2] == ["`matrix_optimizer`", "key"]]
    said = {(json.loads(name), key): json.loads(row[2]) for row in table for name in row[0].split(", ")
            for key in names_in(row[1])}
    family = {name: entry for name, entry in REGISTRY.items() if issubclass(entry, MatrixMomentum)}
    assert said == {(name, key): field.default for name, recipe in family.items() if name != "muon"
                    for key, field in recipe.model_fields.items()
                    if key not in Muon.model_fields or field.default != Muon.model_fields[key].default}
    names, = [{json.loads(row[0]) for row in rows} for header, *rows in tables_of_optimizers()
              if header[:2] == ["`matrix_optimizer`", "what it is for"]]
    assert names == set(family)
    hooks, = [{key for row in rows for key in names_in(row[0])} for header, *rows in tables_of_optimizers()
              if header == ["key", "value", "what it does"]]
    assert hooks == UpdateHooks.model_fields.keys() - Recipe.model_fields.keys()


def test_the_balance_of_a_model_with_experts_is_as_the_page_says(capsys):
    table, = [rows for header, *rows in tables_of(DOCS / "mixture_of_experts.md") if header[0] == "ranks"]
    ranks = [row[0] for row in table]
    cli.main(["plan", "--model", "qwen3-30b-a3b", "--config", str(ROOT / "ds_configs" / "large_stage3.json"),
              "--ranks", ",".join(ranks), "--json"])
    for row, plan in zip(table, json.loads(capsys.readouterr().out), strict=True):
        held = max(each["total"] for each in plan["memory_bytes"])
        needed = held + plan["working_bytes"]["total"]
        assert row == [str(plan["ranks"]), f"{plan['newton_schulz_max_over_mean']:.3f}", f"{held / 2**30:.1f}",
                       f"{needed / 2**30:.1f}"]


def test_memory_left_by_stage_with_and_without_auto_ep_is_as_the_page_says(tmp_path, capsys):
    table, = [rows for header, *rows in tables_of(DOCS / "mixture_of_experts.md") if header[0] == "stage"]
    config = json.loads((ROOT / "ds_configs" / "large.json").read_text())
    for stage, *cells in table:
        config["zero_optimization"]["stage"] = int(stage)
        (tmp_path / "ds.json").write_text(json.dumps(config))
        for ep, cell in zip(("1", "8"), cells, strict=True):
            cli.main(["plan", "--model", "qwen3-30b-a3b", "--config", str(tmp_path / "ds.json"),
                      "--ranks", "64", "--ep", ep, "--memory", "79.6"])
            answer = " ".join(capsys.readouterr().out.split())
            assert f"64 ranks: {cell}" in answer or f"64 ranks: fits, {cell} of 79.6 GiB left" in answer


RESULTS = ROOT / "examples" / "benchmarks" / "results"
#: What the page says costs for: a square, and a matrix of 1:4.
SQUARE, WIDE = (256, 256), (256, 1024)


def state_bytes(recipe, shape):
    """Bytes of the states on the device."""
    return sum(state.nbytes for state in recipe.states(shape).values() if not state.on_host)


def costs_of(recipe):
    """Bytes of states for an element, and FLOPs of an update over Muon's, of both shapes."""
    return ([state_bytes(recipe, shape) / math.prod(shape) for shape in (SQUARE, WIDE)],
            [recipe.work(shape) / Muon().work(shape) for shape in (SQUARE, WIDE)])


def test_costs_of_matrix_optimizers_are_as_the_page_says_and_was_measured():
    table, = [rows for header, *rows in tables_of_optimizers()
              if header == ["`matrix_optimizer`", "bytes of states for an element", "time over Muon's"]]
    measured = {tuple(row[:2]): row for _, *rows in tables_of(RESULTS / "2026-11_2vcpu_matrix_rules.md")
                for row in rows}
    said = {json.loads(name): (states, times) for name, states, times in table}
    assert list(said) == [name for name, entry in REGISTRY.items() if entry.whole]
    for name, (states, times) in said.items():
        own, _ = costs_of(REGISTRY[name]())
        assert states == ", ".join(f"{each:.1f}" for each in own), name
        found = [measured[f"{rows}x{cols}", name] for rows, cols in (SQUARE, WIDE)]
        assert states == ", ".join(row[7] for row in found), name
        assert times == ", ".join(f"{float(row[5]):.1f}" for row in found), name
        for shape, row in zip((SQUARE, WIDE), found, strict=True):
            assert float(row[2]) == pytest.approx(REGISTRY[name]().work(shape) / 1e9, abs=5e-4), name


def test_bytes_and_flops_in_the_tables_of_optimizers_are_those_of_recipes():
    family, = [rows for header, *rows in tables_of_optimizers()
               if header[:2] == ["`matrix_optimizer`", "what it is for"]]
    for name, *_, said, _ in family:
        for rows, cols in ((6, 10), (20, 3)):
            told = eval(said.replace("\u00b7", "*"), {"rows": rows, "cols": cols})
            assert state_bytes(REGISTRY[json.loads(name)](), (rows, cols)) == pytest.approx(told * rows * cols)
    factors, = [rows for header, *rows in tables_of_optimizers() if header[:2] == ["optimizer", "what for"]]
    for name, _, states, flops, *_ in factors:
        own, work = costs_of(REGISTRY[json.loads(name)]())
        assert states == ", ".join(f"{each:.0f}" for each in own), name
        assert flops == ", ".join(f"{each:.1f}" for each in work), name


def test_defaults_of_optimizers_with_factors_are_as_the_page_says():
    of, = [rows for header, *rows in tables_of_optimizers() if header[0].startswith('of "soap"')]
    said = {names_in(keys)[0]: (whose, json.loads(default)) for keys, default, whose, _ in of}
    defaults = {"SOAP": Soap().settings(), "Shampoo": Shampoo().settings()}
    assert KlSoap().settings() == defaults["SOAP"]
    assert said == {key: ("all" if all(key in each for each in defaults.values()) else kind, value)
                    for kind, settings in defaults.items() for key, value in settings.items()
                    if key not in OF_MANY}


def test_defaults_of_the_layout_are_as_the_pages_say():
    tables = assert_defaults(LayerWiseConfig, "`layerwise`", LayerWiseConfig.from_section({}).model_dump())
    whole = {name for path, names, _ in tables if path.name == "layerwise_keys.md" for name in names}
    assert whole == set(LayerWiseConfig.keys())
    assert any(path.name == "README.md" for path, *_ in tables)


@pytest.mark.parametrize("key, page, quoted", [
    ("scale_mode", "optimizers.md", 0), ("weight_decay_method", "optimizer_family.md", 0),
    ("muon_tp_mode", "parallelism.md", 0), ("scalar_optimizer", "optimizer_family.md", 0),
    ("ns_dtype", "optimizer_keys.md", 2), ("ns_coefficients", "optimizer_keys.md", 2)])
def test_the_choices_of_a_key_are_all_there_and_are_taken(key, page, quoted):
    if quoted:
        row, = [row for _, *rows in tables_of(DOCS / page) for row in rows if names_in(row[0]) == [key]]
        values = set(re.findall(r'"(\w+)"', row[1] + row[2]))
    else:
        heads = ("name",) if key == "scalar_optimizer" else (f"`{key}`", "mode")
        table, = [rows for (head, *_), *rows in tables_of(DOCS / page) if head in heads]
        values = {json.loads(row[0]) for row in table}
    for value in values:
        OptimizerConfig.from_section({"params": {key: value}})
    if key == "ns_coefficients":
        from ds_layerwise.orthogonalize.newton_schulz import TABLES
        assert values == set(TABLES)
    else:
        with pytest.raises(ConfigError) as refused:
            OptimizerConfig.from_section({"params": {key: "none of them"}})
        assert values == set(re.findall(r"'(\w+)'", str(refused.value).partition(", got")[0]))


def own_settings(recipe):
    """The defaults of keys that no other kind of optimizer has."""
    return {key: field.default for key, field in recipe.model_fields.items() if key not in OF_MANY}


def test_the_page_has_every_scalar_optimizer_with_its_keys():
    table, = [rows for head, *rows in tables_of_optimizers() if head[-1] == "keys of its own (defaults)"]
    found = {json.loads(name): dict(re.findall(r"`(\w+)`(?: \(([\w.]+)\))?", keys)) for name, *_, keys in table}
    assert found.keys() == {name for name, entry in REGISTRY.items() if not entry.whole}
    for name, keys in found.items():
        recipe = REGISTRY[name]
        assert {key for key, default in keys.items() if not default} == set(recipe.hyper), name
        assert {key: json.loads(default) for key, default in keys.items() if default} == own_settings(recipe), name


# --- names of modules ------------------------------------------------------------------------------------------------


def named(head):
    """Each name of the one table with this second column, with ``any`` instead of a star, and what is said of it."""
    table, = [rows for header, *rows in tables_of_optimizers() if header[1] == head]
    return [(name.replace("*", "any"), row[1]) for row in table for name in names_in(row[0])]


@pytest.mark.parametrize("router", ["mlp.gate.weight", "mlp.router.weight", "router.gate.weight", "gate.wg.weight"])
def test_a_router_is_a_matrix_unless_the_override_of_the_page_says_otherwise(router):
    page = (DOCS / "mixture_of_experts.md").read_text()
    block, = [block for block in blocks("json") if block.page.endswith("experts.md") and "overrides" in block.text]
    model = nn.ModuleDict({"embed": nn.Embedding(40, 8), "norm": nn.LayerNorm(8), "layers": nn.ModuleList()})
    for _ in range(2):
        *path, last = router.split(".")
        layer = module = nn.Module()
        for name in path:
            module.add_module(name, nn.Module())
            module = getattr(module, name)
        module.register_parameter(last, nn.Parameter(nn.Linear(8, 4).weight.detach()))
        model["layers"].append(nn.Sequential(nn.Linear(8, 8), layer))
    assert f"`{router}`" in page
    overrides = LayerWiseConfig.from_section(json.loads(block.text)["layerwise"]).overrides
    for given, whole in (((), True), (overrides, False)):
        routes = route_parameters(model, [{"params": list(model.parameters())}], overrides=given)
        assert {routes[f"layers.{i}.1.{router}"].whole for i in range(2)} == {whole}
        assert routes["layers.0.0.weight"].whole


@pytest.mark.parametrize("name, goes_to", named("goes to"))
def test_a_module_of_this_name_goes_where_the_page_says(name, goes_to):
    # Neither the first nor the last, and of no embedding's shape: it is its name that decides.
    model = nn.Sequential()
    for each, module in {"embed": nn.Embedding(9, 8), "first": nn.Linear(8, 8), name: nn.Linear(8, 5),
                         "last": nn.Linear(5, 7), "norm": nn.LayerNorm(7)}.items():
        model.add_module(each, module)
    routes = route_parameters(model, [{"params": list(model.parameters())}])
    assert routes[f"{name}.weight"].whole is (goes_to == "matrix")
    assert goes_to == "matrix" or routes[f"{name}.weight"].reason == "output head (by name)"
    assert routes["first.weight"].whole and routes["last.weight"].whole
    in_a_list = nn.ModuleDict({"layers": nn.ModuleList([model]), "norm": nn.LayerNorm(7)})
    routes = route_parameters(in_a_list, [{"params": list(in_a_list.parameters())}])
    assert routes[f"layers.0.{name}.weight"].whole


#: What the page says of each name: rows of the projection, and how many heads of 4 they are, where a model of width 16
#: has 4 heads and 2 key-value heads.
HEADS = {"the model's attention heads": (16, 4), "its key-value heads": (8, 2),
         "queries, keys and values of all heads: outputs over the width of a head": (32, 8)}


def attention_with(name, rows):
    model, attention = nn.Module(), nn.Module()
    model.config = SimpleNamespace(num_attention_heads=4, num_key_value_heads=2, hidden_size=16, head_dim=4)
    if name == "in_proj_weight":
        attention.in_proj_weight = nn.Parameter(nn.Linear(16, rows).weight)
    else:
        attention.add_module(name, nn.Linear(16, rows, bias=False))
    model.layers, model.norm = nn.ModuleList([attention]), nn.LayerNorm(16)
    return model


@pytest.mark.parametrize("name, heads", named("heads"))
def test_a_projection_of_this_name_is_cut_into_the_heads_that_the_page_says(name, heads):
    rows, count = HEADS[heads]
    model = attention_with(name, rows)
    routes = route_parameters(model, [{"params": list(model.parameters())}], per_head=True)
    route, = [route for route in routes.values() if name in route.name.split(".")]
    assert route.matrix_shape == (count, 4, 16) and f"{count} heads" in route.reason


def test_no_projection_is_missing_on_the_page():
    model = attention_with("other", 16)
    with pytest.raises(RoutingError, match="per_head_muon found no query, key or value projection") as refused:
        route_parameters(model, [{"params": list(model.parameters())}], per_head=True)
    known = re.search(r"known: ([\w, ]+)", str(refused.value))[1].split(", ")
    assert sorted(known) == sorted(name for name, _ in named("heads"))


# --- links and evidence ----------------------------------------------------------------------------------------------


@each_page
def test_links_lead_somewhere(path):
    for target in re.findall(r"\]\(([^)\s]+)\)", prose_of(path)):
        if target.startswith(("https://", "http://")):
            continue
        name, _, anchor = target.partition("#")
        there = (path.parent / name).resolve() if name else path
        assert there.is_relative_to(ROOT) and there.exists(), target
        assert not anchor or anchor in anchors_of(there), target


def test_the_readme_is_short_and_pages_are():
    lengths = {path.name: len(path.read_text().splitlines()) for path in PAGES}
    assert lengths["README.md"] <= 110
    # Lists that tests/measure.py, tests/matrix.py and tests/api.py make; and a page for those who work on the package.
    others = ("design_files.md", "versions.md", "api.md", "design.md")
    assert max(length for name, length in lengths.items() if name not in others) <= 250
    assert max(lengths["api.md"], lengths["design.md"]) <= 300


def test_the_site_is_built_without_a_warning_and_has_every_page(tmp_path):
    built = subprocess.run([sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", tmp_path], cwd=ROOT,
                           capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    made = {path.with_suffix(".md").name for path in tmp_path.glob("*.html")} - {"404.md"}
    assert made == {path.name for path in PAGES[1:]}
    index = json.loads((tmp_path / "search" / "search_index.json").read_text())
    lowered = {entry["location"].partition("#")[0] for entry in index["docs"] if entry.get("boost", 1) < 1}
    assert {"evidence.html", "design.html", "proposal_backend_hook.html"} <= lowered
    assert not lowered & {"index.html", "training.html", "cli.html"}
    text = " ".join(entry["text"] for entry in index["docs"])
    methods = {name for name in vars(LayerWiseZeroOptimizer) if not name.startswith("_")}
    public = {name for name in ds_layerwise.__all__ if not name.startswith("_")} | methods
    for key in (*LayerWiseConfig.keys(), *params_model(Muon, AdamW, True).keys(), *public):
        assert key in text, key
    # Nothing is fetched from elsewhere.
    for page in tmp_path.glob("*.html"):
        assert not re.findall(r'<script[^>]*src="(?:https?:)?//[^"]+', page.read_text()), page
        assert not re.findall(r'(?:src|href)="(https?:)?//[^"]+\.(?:js|css|woff2?)"', page.read_text()), page


def test_pictures_are_those_of_their_script(tmp_path):
    subprocess.run([sys.executable, "examples/draw_concepts.py", "--out", tmp_path], cwd=ROOT, check=True)
    drawn = {path.name: re.findall("<text[^>]*>([^<]*)", path.read_text()) for path in tmp_path.iterdir()}
    assert len(drawn) == 3 and all(drawn.values())
    for name, texts in drawn.items():
        assert re.findall("<text[^>]*>([^<]*)", (DOCS / "images" / name).read_text()) == texts, name


@pytest.mark.parametrize("path", pages_with_outputs(), ids=lambda path: path.name)
def test_outputs_are_what_the_commands_print(path):
    assert path.read_text() == with_outputs(path.read_text()), "python -m tests.outputs --write"


def test_the_page_of_the_interface_is_what_the_code_says():
    page = api.PAGE.read_text()
    assert page == api.with_api(page), "python -m tests.outputs --write"
    # What is public has a docstring: test_house.py.
    said = set(re.findall(r"^(?:\* )?`(?:class )?(\w+)", page, flags=re.MULTILINE))
    ours = {name for base in LayerWiseZeroOptimizer.__mro__ if base.__module__.startswith("ds_layerwise.")
            for name, value in vars(base).items() if not name.startswith("_")
            and (isinstance(value, property) or inspect.isfunction(value))}
    assert said >= {*ds_layerwise.__all__, *ours} and len(ours) > 40
    assert {*ds_layerwise.__all__} <= {*dir(ds_layerwise)}
    assert api.ENGINE.keys() == {name.key for name in CONTRACT if ".DeepSpeedEngine." in name.path
                                 and not name.key.startswith("_")} - {"zero_use_cpu_optimizer"}


@each_page
def test_files_in_backticks_exist(path):
    for name in names_in(prose_of(path)):
        if re.fullmatch(r"(examples|tests|ds_configs|ds_layerwise|docs)/[\w./-]*", name):
            assert (ROOT / name).exists(), name


def test_names_that_the_design_says_to_look_for_are_in_their_files():
    found = re.findall(r"`([\w/]+\.py): ([\w.]+)`", "".join(
        (DOCS / page).read_text() for page in ("design.md", "design_paths.md")))
    assert len(found) > 20
    for path, name in found:
        source = (ROOT / "ds_layerwise" / path).read_text()
        for part in name.split("."):
            assert re.search(rf"^ *(def|class) {part}\b|^{part}\b.* =", source, re.MULTILINE), (path, name)


def test_tests_and_files_that_the_evidence_names_exist():
    tables = tables_of(DOCS / "evidence.md")
    assert len(tables) >= 5
    for _, *rows in tables:
        for row in rows:
            sources = names_in(row[-1])
            assert sources or "](" in row[-1], row
            for source in sources:
                assert_source(source)
    for path in PAGES:
        for name in names_in(prose_of(path)):
            if re.fullmatch(r"test_\w+\.py(::\w+)*", name):
                assert_source(name)


def assert_source(source):
    file, *names = source.split("::")
    if file.startswith("20"):
        assert (ROOT / "examples" / "benchmarks" / "results" / file).is_file(), source
        return
    found = list((ROOT / "tests").rglob(file))
    assert found, f"tests/ has no {file}"
    assert not names or any(defines(path, names) for path in found), f"{file} has no {'::'.join(names)}"


def defines(path: Path, names):
    body = ast.parse(path.read_text()).body
    for name in names:
        found = [node for node in body if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and node.name == name]
        if not found:
            return False
        body = found[0].body
    return True


# --- Megatron-LM -----------------------------------------------------------------------------------------------------

#: The fields of its OptimizerConfig, and those of its TransformerConfig that change what an update does.
MEGATRON = """
    lr min_lr decoupled_lr decoupled_min_lr weight_decay apply_wd_to_qk_layernorm fp8_recipe fp16 bf16
    reuse_grad_buf_for_mxfp8_param_ag params_dtype use_precision_aware_optimizer store_param_remainders main_grads_dtype
    main_params_dtype exp_avg_dtype exp_avg_sq_dtype optimizer loss_scale initial_loss_scale min_loss_scale
    loss_scale_window hysteresis adam_beta1 adam_beta2 adam_eps decoupled_weight_decay sgd_momentum muon_momentum
    muon_split_qkv muon_nesterov muon_scale_mode muon_fp32_matmul_prec muon_coefficient_type muon_num_ns_steps
    muon_tp_mode muon_extra_scale_factor muon_scalar_optimizer lion_beta1 lion_beta2 soap_shampoo_beta
    soap_precondition_frequency soap_use_kl_shampoo adaptive_muon_moment2_method adaptive_muon_beta2 adaptive_muon_eps
    use_distributed_optimizer use_layer_wise_distributed_optimizer overlap_param_gather
    overlap_param_gather_with_optimizer_step optimizer_cpu_offload optimizer_offload_fraction
    use_torch_optimizer_for_cpu_offload overlap_cpu_optimizer_d2h_h2d pin_cpu_grads pin_cpu_params clip_grad
    grad_norm_skip_threshold log_num_zeros_in_grad barrier_with_L1_time timers config_logger_dir
    optimizer_cuda_graph qk_clip qk_clip_threshold qk_clip_alpha log_max_attention_logit use_mup
    mup_base_hidden_size""".split()


def test_every_name_of_megatron_is_told_and_what_it_is_here_is_there():
    (_, *rows), = (table for table in tables_of(DOCS / "megatron.md"))
    assert sorted(name for row in rows for name in names_in(row[0])) == sorted(MEGATRON)
    sections = {*LayerWiseConfig.keys(), *Override.keys()}
    params = {key for entry in REGISTRY.values() for key in (*params_model(entry, AdamW, True).keys(),)}
    of_deepspeed = {name for page in [DOCS / "config_keys.md"] for name in re.findall(r"`([\w.]+)`", page.read_text())}
    for row in rows:
        for name in names_in(row[1]):
            section, _, key = name.rpartition(".")
            known = sections if section.startswith("layerwise") else {*params, *of_deepspeed}
            assert key in known or name in known, name
        assert names_in(row[1]) or (row[1] == "not applicable" and row[2]), row
        for name in names_in(row[0]):
            there = FOREIGN.get(name, "").removeprefix("optimizer.params.")
            assert there in names_in(row[1]) or not there, name
            known = {*sections, *params, *of_deepspeed, "timers"}  # a section of DeepSpeed's
            assert there or row[1] == "not applicable" or name in known, f"{name} gets no suggestion"


def test_every_setting_of_others_has_another_name_here():
    params = {key for entry in REGISTRY.values() for key in (*params_model(entry, AdamW, True).keys(),)}
    of_deepspeed = {name for page in [DOCS / "config_keys.md"] for name in re.findall(r"`([\w.]+)`", page.read_text())}
    for theirs, ours in FOREIGN.items():
        section, _, key = ours.rpartition(".")
        known = {"optimizer.params": params, "layerwise": LayerWiseConfig.keys(),
                 "layerwise.overrides[]": Override.keys()}.get(section, of_deepspeed)
        assert key in known or ours in known, ours
        assert theirs not in {*params, *LayerWiseConfig.keys()}, theirs
