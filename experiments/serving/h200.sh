#!/usr/bin/env bash
# vLLM with and without Emmy's kernels on one H200 that has no network, in few commands. Run from a checkout, after bundle.sh elsewhere:
#   OUT=FOLDER bash experiments/serving/h200.sh STEP[:LANE][=SECONDS] ...
# Each step gets at most its seconds, leaves what it has measured in OUT/serving.tgz, and goes on there when it is asked for again on the
# same machine. LANE is one of gemma-4-12b.toml's with a pack: emmy, emmy-hybrid, emmy-triton.
#
#   setup         unpacks the archives that lie in .bundle, installs the wheels of .whl, makes the models' folders
#   packs         takes bf16.emmypack and f16.emmypack from .packs, else builds them of the stored rows (needs .whl); lists the served cases
#   tests         the plugin's tests on this GPU
#   race:LANE     the stored attention against that of vLLM in this lane, without which a pack does not serve it; the pack is to be built
#                 anew then (needs .whl)
#   smoke:LANE    a model of six layers in process: everything works before 48 layers cost minutes
#   offline:LANE  prefill, decode and launches in process, and how far logits are from stock's
#   online:LANE   the published points through servers, one wave; outputs of 4096 cut to 1024
#   quality:LANE  the logits alone
#   cache         leaves vLLM's compiled graphs in OUT/cache.tgz.aa ..., from which setup takes them on another machine, in .bundle
#
# Lane and stock are loaded side by side: 24 GB of weights and 16 GiB of keys and values each. A plan of four commands, one behind
# another on one machine: limits, and in the last column what each step is expected to take, of times of single starts and tokens on this
# card. In brackets what is carried beside a checkout of 9 MiB. SOME is POINTS=4096/4096@1,8192/256@4,256/256@64.
#   [.bundle/vllm-lite.tar.xz .packs]  setup=60 packs=30 tests=90 smoke:emmy-triton=150                       25 + 5 + 40 + 90
#   [.bundle/vllm-fa4.tar.xz]          setup=60 offline:emmy=300 online:emmy=230                              15 + 230 + 210
#   []                                 SOME offline:emmy-hybrid=300 online:emmy-hybrid=200                    220 + 130
#   []                                 SOME offline:emmy-triton=300 online:emmy-triton=200                    220 + 130
# 1,315 s in all. The first start of a lane compiles its graphs, 50 s and more; the second finds them in the cache.
# TARGET=cpu: the same on a CPU with a tiny model in f32 and points 64 times as small, which tries the steps out; no setup of archives.
set -uo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
target=${TARGET:-h200} python=${PYTHON:-python3} work=${WORK:-/tmp/emmy-serving}
site=$work/site results=$work/results packs=$work/packs
: "${OUT:?a folder for the results}"
mkdir -p "$OUT" "$site" "$results/logs" "$packs"
cd "$root" || exit

export PYTHONPATH=$root:$root/plugin:$site:$site/nvidia_cutlass_dsl/python_packages PYTHONUNBUFFERED=1
export EMMY_HOME=$work/home EMMY_CACHE=$work/cache/emmy VLLM_CACHE_ROOT=$work/cache/vllm
export TRITON_CACHE_DIR=$work/cache/triton TORCHINDUCTOR_CACHE_DIR=$work/cache/inductor
export HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 VLLM_HOST_IP=127.0.0.1 GLOO_SOCKET_IFNAME=lo
export VLLM_USE_FLASHINFER_SAMPLER=0 VLLM_USE_DEEP_GEMM=0

# One set of flags, so that all starts of a lane find one set of compiled graphs.
flags=(--load-format emmy_random --max-num-seqs 64 --max-num-batched-tokens 8192)
flags+=(--compilation-config '{"cudagraph_capture_sizes":[1,2,4,8,64]}')
model=$work/gemma-4-12b six=$work/gemma-4-12b-six experiment=$root/experiments/serving/gemma-4-12b.toml
served=(@gemma4-12b-server) all=(@gemma4-12b)
if [ "$target" = cpu ]; then
  export VLLM_CPU_KVCACHE_SPACE=1
  flags+=(${CPU_FLAGS---enforce-eager})
  model=$work/gemma-4-tiny six=$model experiment=$work/tiny.toml
  served=("@config:$model:widths=1..64:dtype=f32:form=server") all=("${served[@]}")
fi
emmy() { "$python" -m emmy "$@"; }

setup() {
  local have
  for name in vllm-lite vllm-fa4; do
    if [ -f ".bundle/$name.tar.xz" ] && [ ! -e "$work/$name" ]; then
      { tar -xJf ".bundle/$name.tar.xz" -C "$site" || "$python" -m tarfile -e ".bundle/$name.tar.xz" "$site"; } && touch "$work/$name"
    fi
  done
  if compgen -G '.bundle/cache.tgz.*' >/dev/null && [ ! -e "$work/cached" ]; then
    cat .bundle/cache.tgz.* | tar -xz -C "$work" && touch "$work/cached"
  fi
  if compgen -G '.whl/*.whl' >/dev/null && [ ! -e "$work/wheels" ]; then
    "$python" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target "$site" .whl/*.whl && touch "$work/wheels"
  fi
  "$python" - "$site" <<'PY'
import importlib.util, pathlib, sys, tomllib

site, project = pathlib.Path(sys.argv[1]), tomllib.loads(pathlib.Path("pyproject.toml").read_text())["project"]
info = site / f"emmy-{project['version']}.dist-info"  # by which vLLM finds the plugin
info.mkdir(exist_ok=True)
(info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: emmy\nVersion: {project['version']}\n")
groups = project["entry-points"].items()
(info / "entry_points.txt").write_text("".join(f"[{g}]\n" + "".join(f"{k} = {v}\n" for k, v in e.items()) for g, e in groups))
try:
    import numba  # noqa: F401
except Exception:  # one that does not fit the numpy here; what vLLM compiles with it is not called
    (site / "numba.py").write_text("prange = range\n\n\ndef jit(f=None, **_):\n    return f or jit\n\n\nnjit = jit\n")
PY
  for shape in gemma-4-12b gemma-4-12b-six gemma-4-tiny; do "$python" experiments/serving/shaped_model.py $shape "$work/$shape"; done
  # The published points, 64 times as small, for a CPU.
  sed -E '/^(input|output|prefill|context)/{s/\b256\b/4/;s/\b512\b/8/;s/\b2048\b/32/;s/\b4096\b/64/;s/\b8192\b/128/}
    s/"b?float16"/"float32"/;/attention-backend/d;s/16384/1024/;s/^steps.*/steps = 4/;s/^kv_gib.*/kv_gib = 0.5\nmemory = 0.3/
    s/, "--gpu-memory-utilization", "0.9"//' experiments/serving/gemma-4-12b.toml > "$work/tiny.toml"
  [ -d "$site/vllm" ] || { echo "no vLLM yet: .bundle/vllm-lite.tar.xz was not carried" && return; }
  have=$("$python" -c 'import torch, vllm, transformers as t; print(vllm.__version__, torch.__version__, t.__version__)') || return
  echo "vLLM, torch, transformers: $have; $(nvidia-smi --query-gpu=name,driver_version --format=csv,noheader 2>&1 | head -1)"
}

packs() {
  local rate
  [ -e "$work/raced" ] || cp -n .packs/*.emmypack "$packs/" 2>/dev/null
  if [ "$target" = cpu ] && [ ! -f "$packs/bf16.emmypack" ]; then emmy tune --gpu cpu "${served[@]}" --budget 3; fi
  for dtype in bf16 f16; do # f16: hybrid sums
    rate=$([ $dtype = f16 ] && echo 1 || echo 0)
    [ -f "$packs/$dtype.emmypack" ] ||
      EMMY_FAST_MATH=$rate emmy pack build --gpu "$target" "${served[@]}" "${all[@]}" --out "$packs/$dtype.emmypack" &
  done
  wait
  for dtype in bf16 f16; do
    emmy pack inspect "$packs/$dtype.emmypack" --of "${all[@]}" > "$results/cases-$dtype.txt" || return
    emmy pack inspect "$packs/$dtype.emmypack" > "$results/ranges-$dtype.txt"
    sed -n '/^kind /,$p' "$results/cases-$dtype.txt"
  done
}

tests() { "$python" -m pytest -q -m gpu -p no:cacheprovider tests/plugin/test_on_gpu.py tests/plugin/test_attended_on_gpu.py; }

race() {
  local backend=FLASH_ATTN
  [ "$1" = emmy-triton ] && backend=TRITON_ATTN
  emmy bench '@gemma4-12b-server/attention*.bf16' --gpu "$target" --rounds 3 --against vllm:$backend
  touch "$work/raced" && rm -f "$packs/bf16.emmypack"
  emmy data export --gpu "$target" --out "$results/rows"
}

bench() { # LANE FOLDER MODEL WORD...
  local lane=$1 folder=$2 of=$3 pack=bf16
  shift 3
  [ "$lane" = emmy-hybrid ] && pack=f16
  emmy bench serving "$experiment" --lanes "$lane" --out "$results/$folder" --model "$of" --pack "$lane=$packs/$pack.emmypack" --waves 1 \
    "$@" "${flags[@]}"
}
smoke() { bench "$1" smoke "$six" --offline --logits --rounds 1; }
offline() { bench "$1" measured "$model" --offline --logits --rounds 3; }
online() { bench "$1" measured "$model" --together --most-output 1024 --most-prompts 1 --points "${POINTS:-$(points)}"; }
points() { [ "$target" = cpu ] && echo 64/64@4,4/4@64 || echo 4096/4096@1,4096/4096@4,4096/4096@8,8192/256@4,256/256@64; }
quality() {
  local pack=bf16 dtype=bfloat16 fast=0 more=()
  case $1 in emmy-hybrid) pack=f16 dtype=float16 fast=1 ;; emmy-triton) more=(--attention-backend TRITON_ATTN) ;; esac
  [ "$target" = cpu ] && dtype=float32 more=(--gpu-memory-utilization 0.2)
  EMMY_FAST_MATH=$fast emmy bench quality "$model" --pack "$packs/$pack.emmypack" --dtype $dtype --max-model-len 1024 "${more[@]}" "${flags[@]}"
}
cache() {
  du -sm "$work"/cache/*
  tar -C "$work" -cz --exclude cache/emmy cache | split -b 15M - "$OUT/cache.tgz."
  ls -l "$OUT"/cache.tgz.*
}

if [ "${1:-}" = only ]; then # one step, in the process that `timeout` ends; the command that runs then is waited for
  trap : TERM
  "$2" "${3:-}"
  exit
fi
failed=0
for word in "$@"; do
  IFS=: read -r step lane <<<"${word%%=*}"
  seconds=${word#*=} began=$SECONDS log=$results/logs/${word%%=*}.log
  [ "$seconds" = "$word" ] && seconds=600
  timeout -k 30 "$seconds" bash "$0" only "$step" "$lane" >"$log" 2>&1
  code=$?
  [ $code = 0 ] || failed=1
  echo "== $word: exit code $code after $((SECONDS - began)) s"
  tail -n "${LINES_SHOWN:-40}" "$log" | cut -c1-260
  tar -C "$work" -czf "$OUT/serving.tgz" --exclude '*.npy' results
done
exit $failed
