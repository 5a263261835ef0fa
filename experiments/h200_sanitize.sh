#!/bin/sh
# compute-sanitizer over winners: sh experiments/h200_sanitize.sh WINNERS.jsonl OUT.txt [MOST] [SECONDS A TOOL]
# Each line of WINNERS names an op and a schedule; `summary.jsonl` of h200_matmul.py is such a file.
export OMP_NUM_THREADS=$(nproc)  # for numpy's references
winners=$1 out=$2 most=${3:-6} limit=${4:-60}
tool_path=$(command -v compute-sanitizer || ls /usr/local/cuda/bin/compute-sanitizer /opt/nvidia/*/compute-sanitizer 2>/dev/null | head -1)
: > "$out"
if [ -z "$tool_path" ]; then
  echo "compute-sanitizer is not installed" | tee -a "$out"
  exit 1
fi
failed=0
python3 experiments/run_plan.py --winners "$winners" --most "$most" >> "$out" 2>&1 || failed=1   # without a checker first
for tool in memcheck racecheck synccheck; do
  echo "== $tool" >> "$out"
  timeout "$limit" "$tool_path" --tool $tool --error-exitcode 9 python3 experiments/run_plan.py --winners "$winners" --most "$most" >> "$out" 2>&1
  code=$?
  [ $code -eq 0 ] || failed=1
  echo "$tool: exit code $code" | tee -a "$out"
done
tail -60 "$out"
exit $failed
