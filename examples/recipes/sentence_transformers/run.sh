#!/usr/bin/env bash
# bash examples/recipes/sentence_transformers/run.sh [arguments of the trainer]      needs: pip install sentence-transformers, and
# python examples/recipes/material.py
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
exec deepspeed --num_accelerators "${RANKS:-2}" --master_port "${MASTER_PORT:-29500}" \
    --module ds_layerwise.run "$here/train.py" \
    --deepspeed "${CONFIG:-$here/ds.json}" --output_dir "out/recipes/sentence_transformers" \
    --max_steps 60 --learning_rate 1e-3 --lr_scheduler_type cosine --warmup_steps 5 \
    --per_device_train_batch_size 16 --logging_steps 1 --save_steps 30 --report_to none "$@"
