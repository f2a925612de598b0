#!/usr/bin/env bash
# Correctness, then speed, on this machine's NVIDIA card, in one call of less than ten minutes:
#   benchmarks/gpu.sh [tests] [generate] [ppo]
# All three if none is named; a part that is named alone has the ten minutes for itself. Results go to $OUT, or to
# docs/results. Nothing is fetched; wheels of packages that the machine lacks may lie in wheels/: deepspeed, hjson,
# pydantic, pydantic-core and their needs for ppo, bitsandbytes for its 4-bit case; what lacks them is left out with a line.
set -u -o pipefail
cd "$(dirname "$0")/.." || exit 1

out=${OUT:-docs/results}
python=${PYTHON:-python3}
parts=${*:-tests generate ppo}
for part in $parts; do
  case $part in tests | generate | ppo) ;; *) echo "unknown part $part: tests, generate, ppo"; exit 2 ;; esac
done
set -- $parts
if [ $# -eq 1 ]; then tests=560 generate=560 ppo=540; else tests=180 generate=130 ppo=240; fi
site=$(mktemp -d)
trap 'rm -rf "$site"' EXIT
mkdir -p "$out"
for wheel in wheels/*.whl; do
  [ -e "$wheel" ] && "$python" -m zipfile -e "$wheel" "$site"
done
export PYTHONPATH="$PWD:$site${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false

failed=0
for part in $parts; do
  case $part in
    tests)
      workers=$("$python" -c 'import os; print(max(1, min(8, os.cpu_count() // 2)))')  # compiling is most of it
      timeout $tests "$python" -m pytest -q -m gpu -n "$workers" -p no:cacheprovider tests/kernels/test_gpu_*.py tests/engine/decode/test_gpu_engine.py 2>&1 \
        | tee "$out/gpu_tests.txt" | tail -40 || failed=1 ;;
    generate) timeout $generate "$python" benchmarks/gpu.py --out "$out" || failed=1 ;;
    ppo) timeout $((ppo + 20)) "$python" benchmarks/gpu_ppo.py --out "$out" --seconds $ppo || failed=1 ;;
  esac
done
exit "$failed"
