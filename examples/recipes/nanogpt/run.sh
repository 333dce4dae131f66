#!/usr/bin/env bash
# bash examples/recipes/nanogpt/run.sh [arguments of train.py]
# needs: git clone https://github.com/karpathy/nanoGPT, here, or NANOGPT=the folder
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
exec deepspeed --num_accelerators "${RANKS:-2}" --master_port "${MASTER_PORT:-29500}" \
    --module ds_layerwise.run "$here/train.py" --nanogpt "${NANOGPT:-nanoGPT}" \
    --deepspeed --deepspeed_config "${CONFIG:-$here/ds.json}" "$@"
