"""Accelerate's examples/by_feature/deepspeed_with_config_support.py, from $CLIENTS. Started by run.py.

Accelerate must be told DeepSpeed's communication backend where there is no GPU. Its example does not tell it.
"""

from __future__ import annotations

import functools
import os
import runpy
import sys
from pathlib import Path

import accelerate
from accelerate.utils import InitProcessGroupKwargs
from deepspeed.accelerator import get_accelerator

backend = InitProcessGroupKwargs(backend=get_accelerator().communication_backend_name())
accelerate.Accelerator = functools.partial(accelerate.Accelerator, kwargs_handlers=[backend])
sys.argv[0] = str(Path(os.environ["CLIENTS"], "deepspeed_with_config_support.py"))
runpy.run_path(sys.argv[0], run_name="__main__")
