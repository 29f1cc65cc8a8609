#!/usr/bin/env bash
# Runs the tests group by group, each in a process of its own, goes on after a failure and sums up. Groups of tests that
# must not share a process: kernels under the interpreter, compiled ahead of time, on a GPU; Ray, one at a time.
#   tools/run_tests.sh all | fast | cluster | gpu | aot
set -uo pipefail
cd "$(dirname "$0")/.."
bin=.venv/bin
logs=$(mktemp -d)
trap 'rm -rf "$logs"' EXIT
summary=()
failed=0

run() { # name, command...
  local name=$1 started=$SECONDS code
  shift
  printf '\n== %s\n' "$name"
  "$@" 2>&1 | tee "$logs/out"
  code=${PIPESTATUS[0]}
  local last
  last=$(grep -v '^[[:space:]]*$' "$logs/out" | tail -n 1 | sed 's/\x1b\[[0-9;]*m//g')
  if [ "$code" -eq 0 ]; then
    summary+=("ok      $name ($((SECONDS - started)) s): $last")
  else
    summary+=("FAILED  $name ($((SECONDS - started)) s): $last")
    failed=1
  fi
}

# Dashboards are tried on a real Prometheus: Debian's package, installed here where that is allowed.
need_prometheus() {
  command -v prometheus > /dev/null && return
  if [ "$(id -u)" -eq 0 ] && command -v apt-get > /dev/null; then
    printf '\n== installing prometheus\n'
    { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends prometheus; } \
      > "$logs/apt" 2>&1 || tail -n 3 "$logs/apt"
  fi
  command -v prometheus > /dev/null && return
  summary+=("MISSING prometheus: NO DASHBOARD QUERY WAS TRIED (as root: apt-get install prometheus)")
}

style() {
  run "ruff check" "$bin/ruff" check .
  run "ruff format" "$bin/ruff" format --check .
  run "pyright" "$bin/pyright"
}

parallel="-n 2 --dist worksteal"
case "${1:-all}" in
  all)
    need_prometheus
    style
    run "kernels, interpreted" env TRITON_INTERPRET=1 OMP_NUM_THREADS=1 "$bin/python" -m pytest -q --durations=20 $parallel \
      tests/kernels -m "not aot and not gpu"
    run "kernels, compiled ahead of time" env OMP_NUM_THREADS=1 "$bin/python" -m pytest -q --durations=20 $parallel tests -m aot
    run "everything else" env OMP_NUM_THREADS=1 "$bin/python" -m pytest -q --durations=20 $parallel \
      tests --ignore=tests/kernels -m "not aot and not gpu and not ray and not cluster"
    run "Ray and HTTP" "$bin/python" -m pytest -q -rs --durations=20 tests -m "ray and not gpu"
    ;;
  fast)
    command -v prometheus > /dev/null || summary+=("MISSING prometheus: NO DASHBOARD QUERY WAS TRIED")
    style
    run "fast tests" env OMP_NUM_THREADS=1 "$bin/python" -m pytest -q --durations=5 $parallel \
      tests --ignore=tests/kernels -m "not aot and not gpu and not ray and not model and not cluster"
    ;;
  cluster)
    run "several nodes" "$bin/python" -m pytest -q -rsP --durations=20 tests/cluster_nodes -m cluster
    ;;
  gpu)
    run "GPU" "$bin/python" -m pytest -q --durations=20 tests -m gpu
    ;;
  aot)
    run "ahead of time, full matrix" env MANTA_AOT=full "$bin/python" -m pytest -q --durations=20 tests -m aot
    ;;
  *)
    echo "usage: tools/run_tests.sh all | fast | cluster | gpu | aot" >&2
    exit 2
    ;;
esac

printf '\n== summary\n'
printf '%s\n' "${summary[@]}"
exit $failed
