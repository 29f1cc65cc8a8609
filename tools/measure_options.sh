# Sourced by the scripts that measure: takes their options, [--out FOLDER] [--python PYTHON] [--set KEY=VALUE ...], from
# the arguments and leaves the parts. Gives `python`, `settings` (--set KEY=VALUE ...), `model` (with them), and `out` if told.
python=.venv/bin/python
settings=()
while [ $# -gt 0 ]; do
  case "$1" in
    --out) out=$2; shift 2 ;;
    --python) python=$2; shift 2 ;;
    --set) settings+=(--set "$2"); shift 2 ;;
    *) break ;;
  esac
done
model=(--model llama-3.1-8b-dummy --set max_model_len=40960 "${settings[@]}")
