#!/usr/bin/env bash
# Checks the style and runs the tests, on a fresh clone too. Arguments go to pytest: bash tests/run.sh -k draws -x
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

export VENV="${VENV:-.venv}"
bash examples/make_venv.sh

export HF_HUB_OFFLINE=1 WANDB_MODE=offline TOKENIZERS_PARALLELISM=false
export OMP_NUM_THREADS=1 # the models are tiny: more threads only wait for each other

"$VENV/bin/python" -m ruff check .
"$VENV/bin/python" -m ruff format --check .
"$VENV/bin/python" -m pytest -n 2 --dist loadfile "$@" # its status is that of this script: 5, where no test ran, is a failure as well
