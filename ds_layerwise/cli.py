"""``ds-layerwise``: what can be said of a run before it starts, and done with its checkpoints,
without an engine.

``links`` alone is started on every rank by a launcher: ``deepspeed --module ds_layerwise.cli links
OUT.json``.

Exit codes: 0 for done and ok, 1 for what ``verify`` finds wrong or different, 2 for a refusal, in
one line on stderr.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from tqdm import tqdm

from ds_layerwise.errors import LayerWiseError
from ds_layerwise.output import say, say_last

_UNITS = {
    "": 1,
    "K": 10**3,
    "M": 10**6,
    "G": 10**9,
    "T": 10**12,
    "KI": 2**10,
    "MI": 2**20,
    "GI": 2**30,
    "TI": 2**40,
}
#: GiB of one device, 1 PiB: every text of a plan can say so many bytes, and what they lack.
_MOST_GIB = 2**20
#: More data-parallel ranks than any run has: a plan of the largest models takes a minute there.
_MOST_RANKS = 2**17


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that ``argv`` says, by default that of this process; returns the exit
    code.
    """
    options = _parser().parse_args(argv)
    if options.command != "links":
        # All of it works on the host, and DeepSpeed says on stdout that it looks for a device,
        # unless it is told.
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    commands: dict[str, Callable[[argparse.Namespace], int]] = {
        "plan": _plan,
        "links": _links,
        "schema": _schema,
        "to-universal": _to_universal,
        "verify": _verify,
        "consolidate": _consolidate,
    }
    try:
        return commands[options.command](options)
    except (LayerWiseError, OSError) as e:
        return _refuse(e)


def _refuse(error: Exception) -> int:
    if sys.stderr is not None:
        say(f"ds-layerwise: {' '.join(str(error).split())}", sys.stderr)
    return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "ds-layerwise", description="Plans and checkpoints of ds_layerwise, without an engine."
    )
    # DeepSpeed's launcher puts it before everything else.
    parser.add_argument("--local_rank", help=argparse.SUPPRESS)
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
        help="let the model's file run code, which a client state of other than plain values needs",
    )
    every.add_argument(
        "--quiet",
        action="store_true",
        help="no progress bar; there is none without a terminal, either",
    )
    overwrite = argparse.ArgumentParser(add_help=False)
    overwrite.add_argument(
        "--overwrite", action="store_true", help="replace an OUT that this command wrote before"
    )
    checkpoint = "the folder of a checkpoint, or one with a file named latest"

    _of_plan(
        commands.add_parser(
            "plan", parents=[overwrite], help="the start-up table of a run, without its devices"
        )
    )
    command = commands.add_parser(
        "links",
        parents=[overwrite],
        help="measure the links between the ranks that a launcher has started",
    )
    command.add_argument(
        "out",
        metavar="OUT",
        type=Path,
        help="the file to write, for plan --links and layerwise.links",
    )
    command.add_argument(
        "--like",
        metavar="NAME|FILE",
        help="what has the rest where not all can be measured, as on "
        "one node what is between nodes: nvlink-ib, pcie-ethernet, tcp, or a file",
    )

    commands.add_parser(
        "schema",
        help="a JSON schema of what a DeepSpeed config may say to this backend, for editors",
    )

    command = commands.add_parser(
        "to-universal",
        parents=[every, overwrite],
        help="write a regular checkpoint in DeepSpeed's universal format",
    )
    command.add_argument("path", metavar="IN", type=Path, help=checkpoint)
    command.add_argument("out", metavar="OUT", type=Path, help="the folder to write")

    command = commands.add_parser(
        "verify",
        parents=[every],
        help="check every byte and tensor of a checkpoint, or compare two",
    )
    command.add_argument(
        "path", metavar="PATH", type=Path, help=f"{checkpoint}, regular or universal"
    )
    command.add_argument(
        "other",
        metavar="OTHER",
        type=Path,
        nargs="?",
        help="another one, of any kind and world size",
    )
    command.add_argument(
        "--weights-only", action="store_true", help="leave the optimizer states out"
    )

    command = commands.add_parser(
        "consolidate", parents=[every, overwrite], help="write the float32 weights as safetensors"
    )
    command.add_argument(
        "path", metavar="PATH", type=Path, help=f"{checkpoint}, regular or universal"
    )
    command.add_argument(
        "out",
        metavar="OUT",
        type=Path,
        help="one file if it ends in .safetensors, else a folder as Hugging Face lays it out",
    )
    command.add_argument(
        "--config",
        type=Path,
        metavar="PATH",
        help="Hugging Face's config.json, or a folder with it, "
        "to lay beside the weights; by default those in or above the checkpoint's folder",
    )
    command.add_argument(
        "--dtype",
        choices=("fp32", "bf16", "fp16"),
        default="fp32",
        help="of everything with a floating point (%(default)s)",
    )
    command.add_argument(
        "--max-shard-size",
        type=_num_bytes,
        default="5GB",
        metavar="SIZE",
        help="of one file in a folder, such as 500MB or 2GiB (%(default)s)",
    )
    return parser


def _of_plan(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--model",
        required=True,
        help="a file of names and shapes, the name of one that comes "
        "with the package, or Hugging Face's config.json (with transformers)",
    )
    command.add_argument(
        "--config", required=True, type=Path, metavar="FILE", help="the DeepSpeed config, as JSON"
    )
    command.add_argument(
        "--ranks",
        required=True,
        type=_numbers,
        metavar="N[,N...]",
        help="data-parallel ranks; several numbers give one row each",
    )
    command.add_argument(
        "--links",
        metavar="NAME|FILE",
        help="what seconds are predicted for: nvlink-ib, "
        "pcie-ethernet, tcp, or a JSON file with bandwidths and latencies; by default what "
        'layerwise.links says, and nvlink-ib for "auto"',
    )
    command.add_argument(
        "--ranks_per_node",
        type=_positive,
        metavar="N",
        help="by default what the links say: 8 of those with a name",
    )
    command.add_argument(
        "--reduction",
        choices=("ordered", "native"),
        help="how sums are made: in float32 and rank "
        'order, or the backend\'s way; by default what layerwise.reduction says, and for "auto" '
        "the "
        "backend's way but on tcp",
    )
    command.add_argument(
        "--ep_size",
        type=_positive,
        default=1,
        metavar="N",
        help="ranks that share the experts of a layer, as in deepspeed.moe.layer.MoE (%(default)s)",
    )
    command.add_argument(
        "--tp_size",
        type=_positive,
        metavar="N",
        help="ranks that tensor parallelism cuts the model "
        "for, beside --ranks; by default what tensor_parallel.autotp_size says",
    )
    command.add_argument(
        "--memory",
        type=_gib,
        metavar="GIB",
        help="what one device has, in GiB (2^30 bytes, G in the "
        "tables): says which numbers of ranks and bucket sizes fit; activations are not counted",
    )
    command.add_argument(
        "--list",
        action="store_true",
        help="every parameter, one line each: shape, optimizer, weight "
        "decay, learning rate over lr, owner, and why",
    )
    command.add_argument(
        "--json", action="store_true", help="the same numbers for a program: bytes, elements, FLOPs"
    )
    command.add_argument(
        "--png",
        type=Path,
        metavar="OUT",
        help="draw seconds and memory by number of ranks, too (with matplotlib)",
    )


def _positive(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"must be a whole number from 1 on, got {text!r}")
    return int(text)


def _numbers(text: str) -> list[int]:
    numbers = [_positive(part) for part in text.split(",")]
    if max(numbers) > _MOST_RANKS:
        raise argparse.ArgumentTypeError(
            f"must be at most {_MOST_RANKS:,} each, got {max(numbers)}"
        )
    return numbers


def _gib(text: str) -> int:
    """Bytes of so many GiB."""
    try:
        size = float(text)
    except ValueError:
        size = math.nan
    if not 0 < size <= _MOST_GIB:
        raise argparse.ArgumentTypeError(
            f"must be a number of GiB above 0 and up to {_MOST_GIB:,}, got {text!r}"
        )
    return int(size * 2**30)


def _num_bytes(text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?I?)B?", text.strip().upper())
    size = int(float(match[1]) * _UNITS[match[2]]) if match and match[2] in _UNITS else 0
    if not size:
        raise argparse.ArgumentTypeError(f"must be a size such as 500MB, 5GB or 2GiB, got {text!r}")
    return size


@contextmanager
def _bar(quiet: bool, what: str, total_bytes: int) -> Iterator[Callable[[int], object]]:
    """A progress bar on stderr, where that is a terminal."""
    disable = True if quiet or sys.stderr is None else None
    with tqdm(
        desc=what, total=total_bytes, unit="B", unit_scale=True, disable=disable, leave=False
    ) as bar:
        yield bar.update


def _reading(options: argparse.Namespace) -> dict[str, Any]:
    """How a command reads a checkpoint."""
    return {
        "workers": options.workers,
        "trust": options.trust_client_state,
        "bars": partial(_bar, options.quiet),
    }


@contextmanager
def _all_stays() -> Iterator[None]:
    """Keep Python from looking for garbage among millions of objects of which none is, again and
    again.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


# The commands load what they need themselves. That is torch and deepspeed for all but plan, which
# takes seconds: help and mistakes in the arguments should not.


@_all_stays()
def _plan(options: argparse.Namespace) -> int:
    from ds_layerwise.plan.forecast.param_list import as_text
    from ds_layerwise.plan.forecast.report import as_json, plan_table
    from ds_layerwise.tools.dry_run import DryRun

    if options.png is not None:
        from ds_layerwise.tools import picture

        picture.check_picture(options.png, overwrite=options.overwrite)
    elif options.overwrite:
        raise LayerWiseError(
            "--overwrite is for what --png writes; leave it out, or name a picture"
        )
    if options.memory is not None and options.list and not options.json:
        raise LayerWiseError(
            "--memory is for the tables and --json, and --list alone prints neither; leave one of "
            "the two out, or add --json"
        )
    plan = DryRun.of(
        options.model,
        options.config,
        options.ranks,
        links=options.links,
        reduction=options.reduction,
        ranks_per_node=options.ranks_per_node,
        ep_size=options.ep_size,
        tp_size=options.tp_size,
        memory_bytes=options.memory,
    )
    if options.png is not None:
        picture.draw(options.png, plan.forecasts, plan.predictions)
    if options.json:
        if sys.stderr is not None and plan.assumed:
            say("\n".join(plan.assumed), sys.stderr)
        say_last(
            json.dumps(
                [
                    {
                        **as_json(each, prediction),
                        **({"parameters": plan.listed(each)} if options.list else {}),
                    }
                    for each, prediction in zip(plan.forecasts, plan.predictions, strict=True)
                ]
            )
        )
    elif options.list:
        lists = [
            f"{each.layout.world_size} ranks\n{as_text(plan.listed(each))}"
            for each in plan.forecasts
        ]
        say_last("\n\n".join(["\n".join(plan.assumed), *lists] if plan.assumed else lists))
    else:
        table = plan_table(
            plan.routes,
            plan.specs,
            plan.forecasts,
            plan.run.optimizer,
            without_effect=plan.run.without_effect,
            predictions=plan.predictions,
        )
        say_last("\n".join([*plan.assumed, table]))
    return 0


def _links(options: argparse.Namespace) -> int:
    from ds_layerwise.process_exit import leave
    from ds_layerwise.ranks.comm import comm
    from ds_layerwise.tools.links import measure_links

    joined = measure_links.join()
    try:
        text = measure_links.write_links(
            options.out, like=options.like, overwrite=options.overwrite
        )
    except LayerWiseError as e:
        # All ranks raise alike, and one says it for all. A launcher ends the others with the first
        # that ends.
        if comm.rank_of(None) == 0:
            _refuse(e)
        comm.gather_objects(None, group=None)
        code = 2
    else:
        code = 0
        if comm.rank_of(None) == 0:
            say_last(text)
    if joined:
        leave(code)
    return code


def _schema(options: argparse.Namespace) -> int:
    from ds_layerwise.config.schema import json_schema

    say_last(json.dumps(json_schema(), indent=2))
    return 0


def _to_universal(options: argparse.Namespace) -> int:
    from ds_layerwise.tools.to_universal import to_universal

    say_last(
        to_universal(options.path, options.out, overwrite=options.overwrite, **_reading(options))
    )
    return 0


def _verify(options: argparse.Namespace) -> int:
    from ds_layerwise.tools.compare import differences
    from ds_layerwise.tools.verify import verify

    reading, states = _reading(options), not options.weights_only
    reports = []
    for path in [options.path] + ([options.other] if options.other else []):
        report = verify(path, states=states, **reading)
        say_last(report.summary)
        for line in report.warnings:
            say_last(f"warning: {line}")
        for line in report.problems or ["ok"]:
            say_last(line)
        reports.append(report)
    if any(report.problems for report in reports):
        return 1
    if len(reports) < 2:
        return 0
    one, other = (report.contents for report in reports)
    lines = [
        line
        for parts in zip(one, other)
        for line in differences(*parts, states=states, bars=reading["bars"])
    ]
    if len(one) != len(other):
        lines = [f"the models are cut into {len(one)} and {len(other)} parts"]
    for line in lines or ["equal bit for bit"]:
        say_last(line)
    return 1 if lines else 0


def _consolidate(options: argparse.Namespace) -> int:
    from ds_layerwise.tools.consolidate import consolidate

    say_last(
        "\n".join(
            consolidate(
                options.path,
                options.out,
                dtype=options.dtype,
                max_shard_bytes=options.max_shard_size,
                config=options.config,
                overwrite=options.overwrite,
                **_reading(options),
            )
        )
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
