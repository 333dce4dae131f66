#!/usr/bin/env bash
# bash examples/recipes/timm/run.sh [arguments of train.py]      needs: pip install timm
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
exec deepspeed --num_accelerators "${RANKS:-2}" --master_port "${MASTER_PORT:-29500}" \
    --module ds_layerwise.run "$here/train.py" \
    --deepspeed --deepspeed_config "${CONFIG:-$here/ds.json}" "$@"
