#!/usr/bin/env bash
# Correctness, then speed, on this machine's NVIDIA card, in one call of less than ten minutes:
#   benchmarks/gpu.sh [options of gpu.py]
# Results go to $OUT, or to docs/results. Nothing is fetched; wheels of packages that the machine lacks may lie in wheels/.
set -u -o pipefail
cd "$(dirname "$0")/.." || exit 1

out=${OUT:-docs/results}
python=${PYTHON:-python3}
site=$(mktemp -d)
trap 'rm -rf "$site"' EXIT
mkdir -p "$out"
for wheel in wheels/*.whl; do
  [ -e "$wheel" ] && "$python" -m zipfile -e "$wheel" "$site"
done
export PYTHONPATH="$PWD:$site${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false

failed=0
workers=$("$python" -c 'import os; print(max(1, min(8, os.cpu_count() // 2)))')  # compiling the kernels is most of it
timeout 240 "$python" -m pytest -q -m gpu -n "$workers" -p no:cacheprovider tests/test_gpu_*.py 2>&1 \
  | tee "$out/gpu_tests.txt" | tail -40 || failed=1
timeout 330 "$python" benchmarks/gpu.py --out "$out" "$@" || failed=1
exit "$failed"
