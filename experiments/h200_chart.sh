#!/bin/sh
# The catalogue on an H200 with all lanes in turns, in sittings, and what is known of it then. Run from the checkout:
#   sh experiments/h200_chart.sh OUT SECONDS [EARLIER]
# EARLIER is the OUT of the sitting before: what it holds is not measured again. OUT gets heats.jsonl, lanes.parquet, summary.txt,
# accum.jsonl and shards/, for `emmy data import --own`; `emmy bench report OUT --html ...` draws it anywhere.
out=$1 seconds=$2 earlier=$3
home=${EMMY_WORK:-/tmp/emmy-chart}
mkdir -p "$out" "$home"
[ -z "$earlier" ] || cp "$earlier/heats.jsonl" "$out/"
python3 -m emmy bench kernels @gemma4-12b --gpu h200 --seconds "$seconds" --out "$out" --home "$home" >"$out/summary.txt"
python3 -m emmy bench accum-error --gpu h200 --json >"$out/accum.jsonl"
python3 -m emmy data export --gpu h200 --home "$home" --out "$out/shards"
tail -n 40 "$out/summary.txt"
