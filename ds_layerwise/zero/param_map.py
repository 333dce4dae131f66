"""The file of ``layerwise.dump_param_map``: what becomes of every parameter, as ``ds-layerwise
plan`` prints it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ds_layerwise.checkpoint.files.atomic import write_whole
from ds_layerwise.errors import ConfigError
from ds_layerwise.plan.forecast.report import as_json
from ds_layerwise.ranks.comm import comm
from ds_layerwise.zero.optimizer import LayerWiseZeroOptimizer


def write(optimizer: LayerWiseZeroOptimizer) -> None:
    """Write the file, if the config names one: a list as ``ds-layerwise plan --list --json`` prints
    it, without seconds, of one element, or of one for each stage of a pipeline.

    Rank 0 writes, and whoever reads finds all of it or what was there before.

    Raises:
        ConfigError: on every rank, if rank 0 cannot write.
    """
    path = optimizer.config.dump_param_map
    if path is None:
        return
    plan: dict[str, Any] = {**as_json(optimizer.forecast()), "parameters": optimizer.listed()}
    plans = [plan]
    settings = optimizer.settings
    if settings.model_group is not None and settings.tensor_group is None:
        plans = comm.gather_objects(plan, group=settings.model_group)
    text = json.dumps(plans) + "\n"
    with comm.errors_on_all_ranks(None):
        if comm.rank_of(None) == 0:
            try:
                write_whole(Path(path), lambda new: new.write_text(text, encoding="utf-8"))
            except OSError as e:
                raise ConfigError(
                    f"layerwise.dump_param_map is {str(path)!r}, which cannot be written: "
                    f"{e.strerror or e}; name a file in a folder that rank 0 can write to"
                ) from e
