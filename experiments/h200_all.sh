#!/bin/sh
# Everything measured on an H200, in two sittings of ten minutes. Run from the checkout, with Emmy importable:
#   sh experiments/h200_all.sh first OUT        does it work: tests, error of sums, a small collection, memory checkers
#   sh experiments/h200_all.sh collect OUT ...  the rows, within 490 s, then memory checkers; more words go to h200_matmul.py
#   sh experiments/h200_all.sh chain OUT        decode projections in a chain, with the rows that ship and those just collected
# OUT gets at most eight files. Set EMMY_CACHE, and PYTHONPATH where Emmy is not installed.
mode=$1 out=$2
shift 2
mkdir -p "$out"
work=${EMMY_WORK:-/tmp/emmy-collect}
{
  nvidia-smi --query-gpu=name,driver_version,clocks.sm,temperature.gpu,power.draw --format=csv,noheader
  python3 -c 'import sys, torch, numpy, duckdb; print(sys.version.split()[0], torch.__version__, numpy.__version__, duckdb.__version__)'
  g++ --version | head -1
  case $mode in
    first)
      timeout 240 python3 -m pytest -m gpu tests/measure_gpu -q --maxfail=8 -p no:cacheprovider
      timeout 60 python3 -m emmy bench accum-error --gpu h200 --json >"$out/accum.jsonl"
      timeout 110 python3 experiments/h200_matmul.py --out "$out" --work "$work" --seconds 100 --most-ops 6 --trials 60 --random 30 --searches 3
      timeout 160 sh experiments/h200_sanitize.sh "$out/summary.jsonl" "$out/sanitize.txt" 3 45
      ;;
    collect)
      timeout 505 python3 experiments/h200_matmul.py --out "$out" --work "$work" --seconds 490 "$@"
      timeout 75 sh experiments/h200_sanitize.sh "$out/summary.jsonl" "$out/sanitize.txt" 4 20
      ;;
    chain)
      timeout 300 python3 experiments/h200_chain.py --out "$out/chain.jsonl" --work "$work"
      ;;
    *)
      echo "first, collect or chain, got $mode"
      ;;
  esac
} 2>&1 | tee "$out/all.log"
