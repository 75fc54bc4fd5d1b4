#!/usr/bin/env bash
# Sets up a bare GPU machine that has torch and no network: peers from wheels in .whl, forebay from this checkout.
# Source it: `. benchmarks/device.sh`. Then `gpu_tests` runs the tests; benchmarks find the peers beside forebay.
if ls .whl/*.whl >/dev/null 2>&1; then
  python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --target /tmp/site .whl/*.whl
fi
python3 -m pip install -q --no-index --no-deps --no-build-isolation --upgrade --target /tmp/forebay . 
export PYTHONPATH=/tmp/forebay:/tmp/site TORCH_CUDA_ARCH_LIST=9.0 PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false
export RANK=0 WORLD_SIZE=1 LOCAL_RANK=0 MASTER_ADDR=127.0.0.1 MASTER_PORT=29531
# Peers stay out of the tests' way: transformers imports torchao where it finds it, whose warnings are errors there.
gpu_tests() { PYTHONPATH=/tmp/forebay python3 -m pytest tests/gpu -q -p no:cacheprovider "$@"; }
