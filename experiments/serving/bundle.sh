#!/usr/bin/env bash
# vLLM for a GPU host without a network, in two archives small enough to be carried there:
#   bash experiments/serving/bundle.sh WORK
# WORK/vllm-lite.tar.xz   vLLM and what it needs beside torch, with its Triton attention
# WORK/vllm-fa4.tar.xz    FlashAttention 4, what vLLM takes by itself on Hopper; unpacked over the former
# The host has Python 3.12, torch 2.11.0 for CUDA 13.0, triton 3.6, numpy and the usual of a PyTorch image; only one architecture is kept
# (ARCH=90), and no quantised or mixture-of-experts kernels: a dense text model in bf16 or f16 is what this serves.
# Needs a Python with pip and a package index that has these releases, readelf, strip and xz; 4 to 7 minutes on two cores, 2 GB.
# `h200.sh` beside this file unpacks and uses both.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
work=${1:?usage: bundle.sh WORK}
arch=${ARCH:-90} version=0.25.1
python=$(command -v "${PYTHON:-python3}")
mkdir -p "$work" && cd "$work"
rm -rf lite fa4

# Wheels for the host's Python, whichever runs this.
wheels() { # FOLDER PACKAGE...
  local platforms=()
  for p in manylinux_2_{35,34,31,28,27,24,17,12,5} manylinux2014 manylinux2010 manylinux1; do platforms+=(--platform "${p}_x86_64"); done
  "$python" -m pip install -q --disable-pip-version-check --root-user-action ignore --no-deps --no-compile --only-binary :all: \
    --implementation cp --python-version 3.12 "${platforms[@]}" --target "$@"
}

[ -f whole/.complete ] || { rm -rf whole && wheels whole vllm==$version && touch whole/.complete; }

# 1. Python code, and the few shared objects that such a model calls. vLLM refuses to import its attention without that of FA3.
left_out=(bin .complete vllm/vllm-rs vllm/third_party/{deep_gemm,fmha_sm100,flashmla} vllm/kernels/helion/configs
  vllm/model_executor/layers/{fused_moe/configs,quantization/utils/configs} vllm/entrypoints/serve/instrumentator/static)
mkdir lite
tar -C whole --exclude '*.so' "${left_out[@]/#/--exclude=./}" -cf - . | tar -C lite -xf -
for so in spinloop cumem_allocator fs_io_C vllm_flash_attn/_vllm_fa3_C; do cp whole/vllm/$so.abi3.so lite/vllm/$so.abi3.so; done
"$python" "$here/slim_fatbin.py" {whole,lite}/vllm/_C_stable_libtorch.abi3.so "$arch"

# 2. What the host lacks. Gemma 4's configuration in transformers from 5.15 on lacks fields that this vLLM reads.
wheels lite transformers==5.14.1 tokenizers==0.22.2 pydantic==2.14.4 pydantic-core==2.50.5 typing-inspection==0.4.5 \
  annotated-types==0.8.0 cbor2==6.3.0 pyzmq==27.3.0 openai-harmony==0.0.8 openai==3.57.0 httpx2==2.16.2 sniffio==1.3.1 \
  msgspec==0.23.0 pybase64==1.5.1 cachetools==8.0.2 llguidance==1.7.6 fastapi==0.136.3 starlette==1.10.0 \
  partial-json-parser==0.2.1.1.post7 uvicorn==0.54.0 watchfiles==1.3.0 model-hosting-container-standards==0.1.16 jmespath==1.1.0 \
  prometheus-fastapi-instrumentator==8.1.0 python-multipart==0.0.34 setproctitle==1.3.8 blake3==1.0.11 python-json-logger==4.2.0 \
  ijson==3.6.0 lark==1.3.1 diskcache==5.6.3 jiter==0.19.0 depyf==0.20.0 astor==0.8.1 dill==0.4.1
mkdir lite/xgrammar
cat > lite/xgrammar/__init__.py <<'PY'
"""Stands for xgrammar, 42 MiB, which serves structured output alone."""

__version__ = "0.0.0"


def __getattr__(name: str) -> type:
    if name.startswith("__"):
        raise AttributeError(name)
    return type(name, (), {})
PY
rm -rf lite/bin
find lite -name '*.so*' -size +300k ! -path 'lite/vllm/*' -exec strip --strip-unneeded {} +

# 3. FlashAttention 4 apart, so that without it vLLM takes Triton's.
mkdir -p fa4/vllm/vllm_flash_attn
mv lite/vllm/vllm_flash_attn/cute fa4/vllm/vllm_flash_attn/
wheels fa4 nvidia-cutlass-dsl==4.5.2 nvidia-cutlass-dsl-libs-base==4.5.2 nvidia-cutlass-dsl-libs-cu13==4.5.2 quack-kernels==0.5.0 \
  apache-tvm-ffi==0.1.9 torch-c-dlpack-ext==0.1.5
rm -rf fa4/tvm_ffi/3rdparty fa4/bin fa4/build_backend.py

most_mib=(45 54) # a checkout of 9 MiB beside each makes no more than 64
for name in lite fa4; do
  tar -C $name --sort=name --owner=0 --group=0 --mtime=@0 -cf - . | xz -9 -T2 > vllm-$name.tar.xz
  bytes=$(stat -c %s vllm-$name.tar.xz) most=${most_mib[0]}
  most_mib=("${most_mib[@]:1}")
  echo "vllm-$name.tar.xz: $((bytes / 1048576)) MiB packed, $(du -sm $name | cut -f1) MB unpacked"
  [ "$bytes" -le $((most * 1048576)) ] || { echo "more than $most MiB" >&2; exit 1; }
done
