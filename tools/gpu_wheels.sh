#!/bin/sh
# Collect the wheels that a machine with PyTorch and transformers, but without a network, needs for
# tools/gpu_check.py --wheels DIR, about 10 MB, or only those that are named.
#
#     sh tools/gpu_wheels.sh DIR [PYTHON [NAME...]]    # PYTHON: of the version that the machine has, with pip
set -eu
dir=$1
python=${2:-python3}
cd "$(dirname "$0")/.."

pinned() {
    sed -n "s/^\($1==[^ ]*\).*/\1/p" constraints.txt
}

mkdir -p "$dir"
if [ $# -lt 3 ]; then
    # It has no wheel on the index.
    "$python" -m pip wheel -q --no-deps -w "$dir" "$(pinned antlr4-python3-runtime)"
    set -- "$dir" "$python" torchrl tensordict pyvers hoptorch hydra-core omegaconf orjson datasets dill multiprocess \
        xxhash torchao trl
fi
shift 2
for name in "$@"; do
    "$python" -m pip download -q --no-deps --only-binary=:all: -d "$dir" "$(pinned "$name")"
done
du -sh "$dir"
