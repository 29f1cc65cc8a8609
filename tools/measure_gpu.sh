#!/usr/bin/env bash
# Measures everything on a GPU machine, part by part; each part leaves its file even when a later one fails or is cut off.
#   tools/measure_gpu.sh [--out FOLDER] [--python PYTHON] [--set KEY=VALUE ...] PART ...
# Parts and seconds on an H200: tests 270, tune 210, kernels 120, engine 410, trace 60, profile 60, handoff 200, serve 120,
# tables 1; without parts all of these, in this order. Only when named: quantized (150), quantized-engine (300), and
# multi, which needs two GPUs (tools/measure_multi_gpu.sh).
# Where there are several GPUs, CUDA_VISIBLE_DEVICES chooses one, so that parts can run side by side.
set -uo pipefail
cd "$(dirname "$0")/.."
name=$(nvidia-smi --query-gpu=name --format=csv,noheader 2>/dev/null | head -n 1 | sed 's/^NVIDIA //; s/[^A-Za-z0-9]/-/g')
out=bench/results/$(echo "${name:-none}" | tr '[:upper:]' '[:lower:]')
. tools/measure_options.sh
[ $# -gt 0 ] || set -- tests tune kernels engine trace profile handoff serve tables
[ -n "$name" ] || { echo "no NVIDIA GPU here (nvidia-smi names none)" >&2; exit 2; }
mkdir -p "$out"
# A test that hangs shows where and ends, with its process, as one failure; another project's plugin must not warn.
tests=(-v --dist worksteal -p no:benchmark -o faulthandler_timeout=90 --timeout=120 --timeout-method=thread)
tests+=(--durations=20)
failed=0

pass() { # pytest's arguments; processes of one thread, which would wait for each other otherwise
  OMP_NUM_THREADS=1 timeout 300 "$python" -m pytest "${tests[@]}" "$@"
}

for part in "$@"; do
  started=$SECONDS
  case "$part" in
    tests)
      pass -n 12 -m gpu tests/kernels && pass -n 4 -m "gpu and not alone" tests/engine && pass -m "gpu and alone" tests/engine ;;
    quantized) # tests, tables; each ends at its own bound
      quantized=0
      pass -n 12 -m gpu tests/kernels/quantized && pass -n 4 -m "gpu and not alone" tests/engine/quant || quantized=1
      timeout 120 "$python" -m manta bench kernels --tune attention_decode_codes --write kernels/tuned/nvidia_h200.json ||
        quantized=1
      timeout 280 "$python" -m manta bench quantized --write kernels/tuned/nvidia_h200.json \
        --json "$out/quantized-linears.json" || quantized=1
      [ $quantized -eq 0 ] ;;
    quantized-engine)
      quantized=0
      for what in fp8 int4 kv-fp8; do
        setting=$([ $what = kv-fp8 ] && echo kv_cache=fp8 || echo quantization=$what)
        timeout 280 "$python" -m manta bench engine "${model[@]}" --set "$setting" --against bf16 \
          --workloads decode,prefill --json "$out/engine-llama8b-$what.json" || quantized=1
      done
      [ $quantized -eq 0 ] ;;
    tune) "$python" -m manta bench kernels --tune linear,attention_decode,attention_shared_prefix,attention_prefill \
      --write kernels/tuned/nvidia_h200.json ;;
    kernels) "$python" -m manta bench kernels --json "$out/kernels.json" ;;
    engine) "$python" -m manta bench engine "${model[@]}" --workloads startup,decode,prefill,d2,d1,prefix \
      --json "$out/engine-llama8b-bf16.json" ;;
    trace) "$python" -m manta bench trace "${model[@]}" --json "$out/trace-llama8b-bf16.json" ;;
    handoff) "$python" -m manta bench handoff "${model[@]}" --parts transfer,ttft,itl --json "$out/handoff.json" ;;
    profile) "$python" -m manta profile "${model[@]}" --json engine/profiles/h200/llama-3.1-8b-dummy.json ;;
    serve) "$python" -m manta bench serving --workload d2 --serve llama-3.1-8b-dummy "${settings[@]}" --set max_num_waiting=1024 \
      --set serving.max_queued_requests=1024 --set serving.num_edges=4 --clients 6 \
      --in-process "$out/engine-llama8b-bf16.json" --json "$out/serving-d2.json" ;;
    tables) "$python" -m manta.bench.tables ;;
    multi) tools/measure_multi_gpu.sh --out "$out" --python "$python" "${settings[@]}" ;;
    *) echo "unknown part $part: see the first lines of $0" >&2; exit 2 ;;
  esac
  code=$?
  echo "== $part: $([ $code -eq 0 ] && echo ok || echo "FAILED ($code)"), $((SECONDS - started)) s"
  [ $code -eq 0 ] || failed=1
done
exit $failed
