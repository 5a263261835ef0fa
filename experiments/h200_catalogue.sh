#!/usr/bin/env bash
# The catalogue of Gemma-4-12B on an H200, in sittings that may end at any second. Run from a checkout, with Emmy and the tuner importable:
#   OUT=FOLDER bash experiments/h200_catalogue.sh STEP=SECONDS ...
# After each step OUT has catalogue.tgz: the homes and folders below, which go on on another card of the product when they are unpacked
# in WORK (default /tmp/emmy-catalogue), and shards/, for `emmy data import --own`.
#
#   tune      all of it from nothing, led by the shipped model: `fresh`                      9 minutes for fixed sizes, as much for open ones
#   shares    the winners of that raced against the best stored ones (share_of_best.py)      100 s
#   weak      ranges of open sizes that no stored schedule wins, tuned again: `home`         2 s each
#   server    the same of what a server runs, in bf16, then with sums in f16                 2 s each
#   compiled  fused ops of the server beside torch.compile                                   60 s
#   pack      built, loaded, verified on the card                                            60 s
#   chart     all cases, lanes in turns: `chart`                                             310 s
#   autotuned the twenty cases beside max-autotune: `autotuned`                              20 s each
set -uo pipefail
work=${WORK:-/tmp/emmy-catalogue} python=${PYTHON:-python3}
: "${OUT:?a folder for the results}"
mkdir -p "$OUT" "$work"
cd "$(dirname "$0")/.." || exit
cores=$("$python" -c 'import os; print(os.cpu_count())')
export OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 OMP_WAIT_POLICY=passive PYTHONUNBUFFERED=1
tuned=(--gpu h200 --budget 24 --searches $((cores > 4 ? cores - 2 : 1)))
emmy() { timeout -s INT -k 40 "$left" "$python" -m emmy "$@"; }
again() { # SET: its weak ranges
  local ranges
  mapfile -t ranges < <("$python" experiments/weak_ranges.py "$1" --home "$work/home")
  [ ${#ranges[@]} = 0 ] || emmy tune "${ranges[@]}" "${tuned[@]}" --home "$work/home"
}

tune() { EMMY_SHIPPED=0 emmy tune @gemma4-12b "${tuned[@]}" --model models/h200.txt.xz --home "$work/fresh"; }
shares() {
  "$python" experiments/share_of_best.py given --gpu h200 --fresh "$work/fresh" > "$work/given.jsonl"
  "$python" experiments/race_given.py "$work/given.jsonl" --gpu h200 --out "$work/shares" --work "$work/home" --seconds $((left - 20))
  "$python" experiments/share_of_best.py table "$work/shares/races.jsonl"
}
weak() { again @gemma4-12b; }
server() {
  again '@gemma4-12b-server/*.bf16'
  EMMY_FAST_MATH=1 again '@gemma4-12b-server/*.f16'
}
compiled() { emmy bench '@gemma4-12b-server/geglu*' '@gemma4-12b-server/norms*' --gpu h200 --rounds 3 --against torch.compile --home "$work/home"; }
pack() {
  emmy pack build @gemma4-12b --gpu h200 --home "$work/home" --out "$work/gemma4-12b.emmypack" &&
    emmy pack load "$work/gemma4-12b.emmypack" && emmy pack verify "$work/gemma4-12b.emmypack" --depth run
}
chart() { emmy bench kernels @gemma4-12b --gpu h200 --lanes eager,compile,emmy --rounds 5 --seconds $((left - 15)) --home "$work/home" --out "$work/chart"; }
autotuned() {
  local cases
  cases=$("$python" -c 'from emmy.benchmark.lanes import AUTOTUNED_CASES as c; print(*("@gemma4-12b/" + x for x in c))')
  # shellcheck disable=SC2086
  emmy bench kernels $cases --gpu h200 --rounds 5 --seconds $((left - 25)) --home "$work/home" --out "$work/autotuned"
}

for word in "$@"; do
  step=${word%%=*} left=${word#*=} began=$SECONDS
  $step >"$work/$step.log" 2>&1
  echo "== $step: exit code $? after $((SECONDS - began)) s"
  grep -v '^ \|^cases: \|^compil' "$work/$step.log" | tail -n "${LINES_SHOWN:-15}" | cut -c1-200
  for home in fresh home; do
    [ ! -d "$work/$home" ] || "$python" -m emmy data export --gpu h200 --home "$work/$home" --out "$work/shards" >/dev/null
  done
  tar -C "$work" -czf "$OUT/catalogue.tgz" --exclude cache .
done
