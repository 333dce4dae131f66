#!/usr/bin/env bash
# bash examples/recipes/trl/run.sh sft|dpo|grpo|reward [--adapter lora|dora] [arguments of the trainer]
# needs: pip install trl, and python examples/recipes/material.py
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
task=$1
shift
# Some completions of GRPO are one prompt's; the other trainers have no such argument.
length=(--max_length 64)
[ "$task" = grpo ] && length=(--num_generations 4 --max_completion_length 16)
exec deepspeed --num_accelerators "${RANKS:-2}" --master_port "${MASTER_PORT:-29500}" \
    --module ds_layerwise.run "$here/train.py" --task "$task" \
    --deepspeed "${CONFIG:-$here/ds.json}" --output_dir "out/recipes/trl_$task" "${length[@]}" \
    --max_steps 60 --learning_rate 2e-4 --lr_scheduler_type cosine --warmup_steps 5 --bf16 false \
    --per_device_train_batch_size 8 --gradient_checkpointing false \
    --logging_steps 1 --save_steps 30 --report_to none "$@"
