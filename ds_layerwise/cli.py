"""``ds-layerwise``: plans of runs and work on checkpoints, without an engine.

Exit codes: 0 for success; 1 if ``verify`` finds problems; 2 for a refusal, with one line on stderr.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import re
import sys
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from ds_layerwise import __version__
from ds_layerwise.errors import LayerWiseError
from ds_layerwise.output import progress, say, say_last

#: The largest memory of one device in GiB: 1 PiB. All texts of a plan have room for such numbers,
#: also negative ones.
_MOST_GIB = 2**20
#: The largest number of data-parallel ranks, more than any run has: a plan of the largest models
#: takes a minute there.
_MOST_RANKS = 2**17

#: The options of ``plan`` for the axes of a mesh.
_AXES = {
    "tp": "tensor-parallel parts of a matrix; by default as in the config, as the next two",
    "ep": "ranks that share the experts",
    "sp": "ranks that share a sequence",
    "pp": "pipeline stages",
}

#: The options of ``plan`` that ask for other output, each with those that it cannot have.
_APART = {
    "fit": ("memory", "gb_s", "verbose", "list", "json"),
    "tokens": ("list", "json"),
    "verbose": ("list", "json"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that ``argv`` names, this process's arguments by default.

    Returns:
        The exit code.
    """
    options = _parser().parse_args(argv)
    # All commands work on the host. Without this, DeepSpeed prints on stdout that it looks for a
    # device.
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    try:
        code: int = options.run(options)
    except (LayerWiseError, OSError) as error:
        if sys.stderr is not None:
            say(f"ds-layerwise: {' '.join(str(error).split())}", sys.stderr)
        return 2
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "ds-layerwise", description="Plans and checkpoints of ds_layerwise, without an engine."
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    every = argparse.ArgumentParser(add_help=False)
    every.add_argument(
        "--workers",
        type=_positive,
        metavar="N",
        default=min(8, len(os.sched_getaffinity(0))),
        help="threads that read and write; by default one a core, at most 8 (%(default)s here)",
    )
    every.add_argument(
        "--trust-client-state",
        action="store_true",
        help="allow code in the model's file to run, as client states that have more than plain "
        "values need",
    )
    every.add_argument(
        "--quiet",
        action="store_true",
        help="no progress bar; there is none without a terminal, either",
    )
    overwrite = argparse.ArgumentParser(add_help=False)
    overwrite.add_argument(
        "--overwrite", action="store_true", help="replace what this command wrote there before"
    )

    def command(
        name: str, run: Callable[[argparse.Namespace], int], text: str, *parents: Any
    ) -> Callable[..., Any]:
        made = commands.add_parser(name, parents=parents, help=text)
        made.set_defaults(run=run)
        return made.add_argument

    _plan_arguments(command("plan", _plan, "say whether a run fits, and what it costs; no devices"))
    add = command("check", _check, "say what a run would say of a config, without a model")
    add("config", type=Path, metavar="FILE", help="the DeepSpeed config, as JSON")

    checkpoint = "the folder of a checkpoint, or one with a file named latest"
    either = f"{checkpoint}, regular or universal"
    add = command(
        "to-universal",
        _to_universal,
        "write a regular checkpoint in DeepSpeed's universal format",
        every,
        overwrite,
    )
    add("path", metavar="IN", type=Path, help=checkpoint)
    add("out", metavar="OUT", type=Path, help="the folder to write")

    add = command(
        "verify", _verify, "say what a checkpoint holds, and check every byte and tensor", every
    )
    add("path", metavar="PATH", type=Path, help=either)
    add("--weights-only", action="store_true", help="leave the optimizer states out")

    add = command(
        "consolidate", _consolidate, "write the float32 weights as safetensors", every, overwrite
    )
    add("path", metavar="PATH", type=Path, help=either)
    add(
        "out",
        metavar="OUT",
        type=Path,
        help="one file if it ends in .safetensors, else a folder as Hugging Face lays it out",
    )
    add(
        "--config",
        type=Path,
        metavar="PATH",
        help="Hugging Face's config.json, or a folder with it, to lay beside the weights; by "
        "default those in or above the checkpoint's folder",
    )
    add(
        "--dtype",
        choices=("fp32", "bf16", "fp16"),
        default="fp32",
        help="dtype of all floating-point tensors (%(default)s)",
    )
    add(
        "--max-shard-size",
        type=_num_bytes,
        default="5GB",
        metavar="SIZE",
        help="largest size of one file in a folder, such as 500MB or 2GiB (%(default)s)",
    )
    return parser


def _plan_arguments(add: Callable[..., Any]) -> None:
    add(
        "--model",
        required=True,
        metavar="NAME|config.json|MODULE:FUNCTION",
        help="the name of a model that comes with the package, a config.json of transformers or a "
        "folder with one, or a function that returns the model",
    )
    add("--config", required=True, type=Path, metavar="FILE", help="the DeepSpeed config, as JSON")
    add(
        "--ranks",
        required=True,
        type=_numbers,
        metavar="N[,N...]",
        help="ranks of the run; several numbers give one column each",
    )
    for axis, text in _AXES.items():
        add(f"--{axis}", type=_positive, metavar="N", help=text)
    add(
        "--gb_s",
        type=_rate,
        metavar="GB/S",
        help="the bandwidth of one rank in 10^9 bytes a second: shows how long the bytes take",
    )
    add(
        "--memory",
        type=_gib,
        metavar="GIB",
        help="memory of one device in GiB (2^30 bytes): says whether the run fits, and recommends "
        "a stage",
    )
    add(
        "--tokens",
        type=_positive,
        metavar="N",
        help="tokens of a micro-batch on one rank: counts their activations, with checkpointing",
    )
    add(
        "--fit",
        type=_gib,
        metavar="GIB",
        help="memory of one device in GiB: prints the changes of the config with which the run "
        "fits, cheapest first; --ranks are then devices",
    )
    add(
        "--list",
        action="store_true",
        help="every parameter, one line each: shape, optimizer, weight decay, learning rate over "
        "lr, owner, and why",
    )
    add("--verbose", action="store_true", help="the tables that rank 0 prints at start")
    add("--json", action="store_true", help="the same numbers for a program")


def _positive(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"must be a whole number from 1 on, got {text!r}")
    return int(text)


def _numbers(text: str) -> list[int]:
    numbers = list(map(_positive, text.split(",")))
    if max(numbers) > _MOST_RANKS:
        raise argparse.ArgumentTypeError(
            f"must be at most {_MOST_RANKS:,} each, got {max(numbers)}"
        )
    return numbers


def _amount(text: str, most: float, bounds: str) -> float:
    """Return a number above 0 and up to ``most``; ``bounds`` says so in the error."""
    try:
        amount = float(text)
    except ValueError:
        amount = math.nan
    if not 0 < amount <= most:
        raise argparse.ArgumentTypeError(f"must be a number of {bounds}, got {text!r}")
    return amount


def _gib(text: str) -> int:
    """Return a number of GiB in bytes."""
    return int(_amount(text, _MOST_GIB, f"GiB above 0 and up to {_MOST_GIB:,}") * 2**30)


def _rate(text: str) -> float:
    return _amount(text, sys.float_info.max, "GB/s above 0")


def _num_bytes(text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(?:([KMGT])(I?))?B?", text.strip().upper())
    size = 0
    if match:
        base = 1024 if match[3] else 1000
        size = int(float(match[1]) * base ** " KMGT".index(match[2] or " "))
    if not size:
        raise argparse.ArgumentTypeError(f"must be a size such as 500MB, 5GB or 2GiB, got {text!r}")
    return size


def _reading(options: argparse.Namespace) -> Any:
    """Return the common choices of all functions that read a checkpoint."""
    from ds_layerwise.checkpoint.checkpoint_folder import Reading

    bars = partial(progress, quiet=options.quiet)
    return Reading(options.workers, options.trust_client_state, bars)


# Each command imports its own modules. These need torch and deepspeed, which take seconds to load;
# help and mistakes in the arguments should not wait for them.


def _plan(options: argparse.Namespace) -> int:
    for name, others in _APART.items():
        for other in others:
            if getattr(options, name) and getattr(options, other):
                raise LayerWiseError(f"--{name} and --{other} do not go together; leave one out")
    if options.memory and options.list and not options.json:
        raise LayerWiseError("--list has no row for --memory; leave one out, or add --json")
    # A plan keeps all that it makes: searching that for garbage takes a tenth of the time.
    was_on = gc.isenabled()
    gc.disable()
    try:
        return _print_plan(options)
    finally:
        if was_on:
            gc.enable()


def _print_plan(options: argparse.Namespace) -> int:
    from ds_layerwise.engine.config_hook import read_file
    from ds_layerwise.plan.forecast.text_tables import rendered
    from ds_layerwise.tools import fit
    from ds_layerwise.tools.dry_run import DryRun

    # Batches do not have to multiply out on all of the devices that are tried.
    ranks = options.ranks if options.fit is None else options.ranks[:1]
    plan = DryRun.of(options.model, options.config, ranks, mesh=vars(options))
    if options.json or options.list or options.verbose:
        return _print_numbers(options, plan)
    activations = plan.activations(options.tokens) if options.tokens else 0
    memory = options.memory or options.fit
    found: list[list[fit.Fit]] = []
    if memory:
        found = fit.find_fits(
            plan.model,
            read_file(options.config),
            options.ranks,
            memory_bytes=memory,
            activations=activations,
            mesh=vars(options),
        )
    if options.fit:
        table = fit.as_text(found, options.ranks, memory, activations)
        say_last(f"{rendered(plan.assumed)}\n{table}".lstrip())
        return 0
    say_last(
        fit.answer(
            plan, found, ranks, memory_bytes=memory, activations=activations, gb_s=options.gb_s
        )
    )
    return 0


def _print_numbers(options: argparse.Namespace, plan: Any) -> int:
    """Print a plan as ``--json``, ``--list`` and ``--verbose`` want it."""
    from ds_layerwise.plan.forecast.report import as_json, as_text, plan_table, stages_told
    from ds_layerwise.plan.forecast.text_tables import rendered, size_text

    plans: list[Any] = []
    for stage in plan.stages:
        plans += product([stage], stage.forecasts)
    known = {"memory_bytes": options.memory, "gb_s": options.gb_s}
    if options.json:
        if sys.stderr is not None and plan.assumed:
            say("\n".join(plan.assumed), sys.stderr)
        numbers_of_plans = []
        for stage, forecast in plans:
            numbers = as_json(forecast, **known)
            if options.list:
                numbers["parameters"] = stage.listed(forecast)
            numbers_of_plans.append(numbers)
        say_last(json.dumps(numbers_of_plans))
    elif options.list:
        parts = [rendered(plan.assumed)]
        for stage, forecast in plans:
            parts.append(f"{forecast.layout.world_size} ranks\n{as_text(stage.listed(forecast))}")
        about = (
            "lr ratio: the learning rate over lr; owner: the rank that updates it whole, or all, "
            "each of which updates its cut; because: the rule that decided"
        )
        parts.append(rendered([about]))
        say_last("\n\n".join(filter(None, parts)))
    else:
        table = plan_table(
            plan.routes,
            plan.specs,
            plan.forecasts,
            plan.run.optimizer,
            without_effect=plan.run.without_effect,
            clip_grad=plan.run.clip_grad,
            **known,
        )
        stages = [each.forecasts for each in plan.stages]
        told = [*plan.assumed, *(stages_told(stages) if len(stages) > 1 else ())]
        if options.tokens:
            activations = size_text(plan.activations(options.tokens))
            told.append(f"needed and fits, below, leave out {activations} of activations")
        say_last(f"{rendered(told)}\n{table}".lstrip())
    return 0


def _check(options: argparse.Namespace) -> int:
    from ds_layerwise.plan.forecast.text_tables import rendered
    from ds_layerwise.tools.dry_run import checked

    say_last(rendered(checked(options.config)))
    return 0


def _to_universal(options: argparse.Namespace) -> int:
    from ds_layerwise.tools.exports import to_universal

    say_last(
        to_universal(options.path, options.out, _reading(options), overwrite=options.overwrite)
    )
    return 0


def _verify(options: argparse.Namespace) -> int:
    from ds_layerwise.tools.verify import verify

    report = verify(options.path, _reading(options), states=not options.weights_only)
    lines = [report.summary, *report.holds]
    for line in report.warnings:
        lines.append(f"warning: {line}")
    say_last("\n".join([*lines, *(report.problems or ["ok"])]))
    return int(bool(report.problems))


def _consolidate(options: argparse.Namespace) -> int:
    from ds_layerwise.tools.exports import consolidate

    lines = consolidate(
        options.path,
        options.out,
        _reading(options),
        dtype=options.dtype,
        max_shard_bytes=options.max_shard_size,
        config=options.config,
        overwrite=options.overwrite,
    )
    say_last("\n".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
