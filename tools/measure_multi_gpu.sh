#!/usr/bin/env bash
# Tries and measures what needs two GPUs of one machine, part by part. Each part is bounded in time and leaves its file
# even when a later one fails or is cut off; the most telling ones come first.
#   tools/measure_multi_gpu.sh [--out FOLDER] [--python PYTHON] [--set KEY=VALUE ...] PART ...
# Parts: probe, all-reduce, ranks, kv, engine, handoff, 70b, gang, pools.
# Without parts: all of them, in this order. None of it has run on two GPUs yet: the limits are guesses.
# Before that, on one GPU of the kind: `tune` finds configurations for what a rank of two computes.
set -uo pipefail
cd "$(dirname "$0")/.."
# NVLink multicast is not used, and a program that does can disturb other users of the host.
export NCCL_NVLS_ENABLE=${NCCL_NVLS_ENABLE:-0} TORCH_SYMM_MEM_DISABLE_MULTICAST=${TORCH_SYMM_MEM_DISABLE_MULTICAST:-1}
out=bench/results/h200
. tools/measure_options.sh
[ $# -gt 0 ] || set -- probe all-reduce ranks kv engine handoff 70b gang pools
num_gpus=$(nvidia-smi --list-gpus 2>/dev/null | wc -l)
[ "$num_gpus" -ge 2 ] || [ "$*" = tune ] || { echo "two NVIDIA GPUs are needed, and nvidia-smi lists $num_gpus" >&2; exit 2; }
mkdir -p "$out"
table=kernels/tuned/nvidia_h200.json
tests=(-q -rs -W default -m multi_gpu -p no:benchmark -o faulthandler_timeout=100 --timeout=150 --durations=10)
failed=0

within() { # seconds, command...
  timeout --kill-after=10 "$@"
}

probe() {
  nvidia-smi topo -m
  "$python" - << 'PROBE'
import torch

print("torch", torch.__version__, "NCCL", ".".join(map(str, torch.cuda.nccl.version())), torch.cuda.device_count(), "GPUs")
print("peer access 0 -> 1:", torch.cuda.can_device_access_peer(0, 1), "1 -> 0:", torch.cuda.can_device_access_peer(1, 0))
x = torch.empty(1 << 28, dtype=torch.uint8, device="cuda:0")
y = torch.empty_like(x, device="cuda:1")
begun, done = (torch.cuda.Event(enable_timing=True) for _ in range(2))
for _ in range(2):
    begun.record()
    y.copy_(x)
    done.record()
    torch.cuda.synchronize()
print(f"copy 0 -> 1: {x.numel() / begun.elapsed_time(done) / 1e6:.0f} GB/s")
PROBE
}

parts="tune probe all-reduce ranks kv engine handoff 70b gang pools"
for part in "$@"; do
  [[ " $parts " == *" $part "* ]] || { echo "unknown part $part: one of $parts" >&2; exit 2; }
done

for part in "$@"; do
  started=$SECONDS
  log="$out/multi-$part.log"
  case "$part" in
    tune) within 590 "$python" -m manta bench kernels --tune linear_ranks,attention_decode_ranks --write "$table" \
      && cp "$table" "$out/tuned-nvidia_h200.json" ;;
    probe) export -f probe; export python; within 60 bash -c probe ;;
    all-reduce)
      within 200 "$python" -m manta bench all-reduce --num-gpus 2 --json "$out/all-reduce.json" --write "$table" \
        && cp "$table" "$out/tuned-nvidia_h200.json" ;;
    ranks) within 300 "$python" -m pytest "${tests[@]}" tests/engine/parallel/test_two_gpus.py ;;
    kv) within 120 "$python" -m pytest "${tests[@]}" tests/engine/kv_transfer ;;
    engine)
      within 300 "$python" -m manta bench engine "${model[@]}" --set tensor_parallel_size=2 --repeats 2 \
        --workloads decode,prefill,d2,d1 --batch-sizes 1,32,128,256 --prefill-lens 2048,8192 \
        --json "$out/engine-llama8b-bf16-tp2.json" ;;
    handoff)
      within 100 "$python" -m manta bench handoff "${model[@]}" --devices cuda:0,cuda:1 --parts transfer --repeats 5 \
        --json "$out/handoff-transfer-two-gpus.json"
      within 300 "$python" -m manta bench handoff "${model[@]}" --devices cuda:0,cuda:1 --parts ttft,itl --repeats 3 \
        --duration 15 --json "$out/handoff-two-gpus.json" ;;
    70b)
      within 240 "$python" -m manta bench engine --model llama-3.1-70b-dummy --set max_model_len=16384 "${settings[@]}" --repeats 2 \
        --workloads decode,prefill --batch-sizes 1,128 --prefill-lens 2048,8192 \
        --json "$out/engine-llama70b-bf16-tp2.json" ;;
    gang) within 300 "$python" -m pytest "${tests[@]}" -s tests/replicas/test_gang.py ;;
    pools) within 300 "$python" -m pytest "${tests[@]}" tests/replicas/test_pools_serve.py ;;
  esac 2>&1 | tee "$log"
  code=${PIPESTATUS[0]}
  echo "== $part: $([ "$code" -eq 0 ] && echo ok || echo "FAILED ($code)"), $((SECONDS - started)) s"
  [ "$code" -eq 0 ] || failed=1
done
exit $failed
