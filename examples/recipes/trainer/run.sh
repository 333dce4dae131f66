#!/usr/bin/env bash
# bash examples/recipes/trainer/run.sh lm|image|translation|ner [arguments of TrainingArguments]
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
task=$1
shift
exec deepspeed --num_accelerators "${RANKS:-2}" --master_port "${MASTER_PORT:-29500}" \
    --module ds_layerwise.run "$here/train.py" --task "$task" \
    --deepspeed "${CONFIG:-$here/ds.json}" --output_dir "out/recipes/trainer_$task" \
    --max_steps 60 --learning_rate 1e-3 --lr_scheduler_type cosine --warmup_steps 5 \
    --per_device_train_batch_size 16 --logging_steps 1 --save_steps 30 --report_to none "$@"
