#!/bin/sh
# Collect the wheels that a machine with PyTorch and transformers, but without a network, needs for
# tools/gpu_check.py --wheels DIR. About 10 MB.
#
#     sh tools/gpu_wheels.sh DIR [PYTHON]    # PYTHON: of the version that the machine has, with pip
set -eu
dir=$1
python=${2:-python3}
cd "$(dirname "$0")/.."

pinned() {
    sed -n "s/^\($1==[^ ]*\).*/\1/p" constraints.txt
}

mkdir -p "$dir"
for name in torchrl tensordict pyvers hoptorch hydra-core omegaconf orjson datasets dill multiprocess xxhash torchao trl; do
    "$python" -m pip download -q --no-deps --only-binary=:all: -d "$dir" "$(pinned "$name")"
done
# It has no wheel on the index.
"$python" -m pip wheel -q --no-deps -w "$dir" "$(pinned antlr4-python3-runtime)"
du -sh "$dir"
