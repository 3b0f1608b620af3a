#!/usr/bin/env bash
# Everything that needs a GPU, in one command: at most ten minutes with 16 cores.
#
#   bench/gpu_check.sh OUT [STAGE...]
#
# OUT      folder for the results; made if it is not there. They are one file, OUT/results.tgz, made
#          anew after every stage:
#            summary.json     of every stage: exit status, seconds, one line that says what came out
#            STAGE.log        all that the stage printed
#            environment.json versions, and clocks during every stage
#            bench.json, bench.md, targets.md, variants.json, variants.md and the variants' sources,
#            counters.json, counters.md, step.json, step.md, conformance_*.xml
#          Tables are printed at the end, that of the targets last.
# STAGE    run only these, in the order of the table below (a build must have gone before)
#
#   LIMIT=575         seconds after which the stage at work is stopped and no other begins
#   PYTHON=python3    the interpreter; torch >= 2.11 for CUDA. pytest, hypothesis, xdist, ninja and
#                     rich are used where they are there
#   CUDA_HOME         the toolkit; by default that of the nvcc on PATH, else where torch looks
#
# Every stage has a time limit of its own and leaves the others alone: a later one runs though an
# earlier one failed. The exit status is the number of stages that failed. Nothing is installed, no
# network is used, no setting of the GPU is touched. It builds the extension in place.
set -uo pipefail

# stage                  seconds   command
STAGES='
environment                  20   python bench/gpu/environment.py $RESULTS
build                       100   python bench/gpu/build.py
conformance_mask_pack        60   python bench/gpu/conformance.py cuda $RESULTS mask_pack
variants                    110   python bench/gpu/variants.py $RESULTS --seconds 90
bench                        85   python bench/gpu/bench.py $RESULTS --seconds 70
counters                     60   python bench/gpu/counters.py $RESULTS --seconds 45
step                         80   python bench/gpu/step.py $RESULTS --seconds 65
graphs                       15   python bench/gpu/graphs.py
sanitizer_memcheck           10   sanitizer memcheck
sanitizer_racecheck          10   sanitizer racecheck
sanitizer_initcheck          10   sanitizer initcheck
sanitizer_synccheck          10   sanitizer synccheck
conformance_cuda            130   python bench/gpu/conformance.py cuda $RESULTS
large                        15   python bench/gpu/large.py
streams                      15   python bench/gpu/streams.py
gradients                    15   python bench/gpu/gradients.py
layer                        90   python bench/gpu/layer.py
compile                      45   python bench/gpu/compile.py
conformance_triton          150   python bench/gpu/conformance.py triton $RESULTS
'
TABLES='counters.md step.md variants.md'

help() {
  sed -n '2,/^set/{/^set/!s/^# \{0,1\}//p}' "$0"
  echo "Stages, their time limits in seconds, and what they run:$STAGES"
}

python() { "$PYTHON" "$@"; }

sanitizer() {
  local tool=compute-sanitizer
  command -v $tool >/dev/null || tool=${CUDA_HOME:-/usr/local/cuda}/bin/compute-sanitizer
  command -v "$tool" >/dev/null || { echo "compute-sanitizer is not there"; return 127; }
  build/gpu/sanitize || return  # what fails by itself needs no tool to find it
  "$tool" --tool "$1" --error-exitcode 9 --print-limit 20 build/gpu/sanitize
}

# Runs in a shell of its own, under `timeout`.
if [[ ${1:-} == --stage ]]; then
  shift
  eval "$@"
  exit
fi

case ${1:-} in
  "" | -h | --help)
    help
    exit
    ;;
  -*)
    echo "gpu_check.sh: unknown option $1; --help tells" >&2
    exit 2
    ;;
esac

# Whole, or as it was: whoever ends this finds what there was after the last stage.
keep() { tar -C "$RESULTS" -czf "$OUT/.results.tgz" . && mv "$OUT/.results.tgz" "$OUT/results.tgz"; }

finish() {
  [[ -z $POLLING ]] || { kill "$POLLING"; wait "$POLLING"; } 2>/dev/null
  rm -rf "$RESULTS" "$RESULTS.clocks"
}

mkdir -p "$1" || exit 2
OUT=$(realpath "$1")
SELF=$(realpath "$0")
PYTHON=$(command -v "${PYTHON:-python3}") || { echo "gpu_check.sh: there is no Python" >&2; exit 2; }
PYTHON=$(realpath --no-symlinks "$PYTHON")  # a virtual environment's is a link
shift
cd "$(dirname "$SELF")/.." || exit 2
PATH=$(dirname "$PYTHON"):$PATH  # its ninja
# The nvcc on PATH may be a link or a script: it tells itself where its toolkit is.
TOOLKIT=$(nvcc --dryrun -x cu /dev/null 2>&1 | sed -n 's/^#\$ TOP=//p')
[[ -n ${CUDA_HOME:-} || -z $TOOLKIT ]] || CUDA_HOME=$(realpath "$TOOLKIT")

for stage in "$@"; do
  grep -q "^$stage " <<<"$STAGES" || { echo "gpu_check.sh: no stage $stage; --help tells" >&2; exit 2; }
done

RESULTS=$(mktemp -d) || exit 2
POLLING=
trap finish EXIT
export PATH PYTHON RESULTS ${CUDA_HOME:+CUDA_HOME} PYTHONUNBUFFERED=1
if command -v nvidia-smi >/dev/null; then
  FIELDS=$(sed -n 's/^FIELDS = "\(.*\)"$/\1/p' bench/gpu/clocks.py)
  stdbuf -oL nvidia-smi --id=0 --query-gpu="$FIELDS" --format=csv,noheader,nounits -lms 250 \
    </dev/null >"$RESULTS.clocks" 2>&1 &  # beside: tar refuses what grows meanwhile
  POLLING=$!
fi

failed=0
while read -r stage limit command; do
  [[ -z $stage || ($# -gt 0 && " $* " != *" $stage "*) ]] && continue
  left=$((${LIMIT:-575} - SECONDS))
  start=$EPOCHREALTIME rc=none
  if ((left > 0)); then
    limit=$((left < limit ? left : limit))
    timeout --signal INT --kill-after 5 "$limit" "$BASH" "$SELF" --stage "$command" </dev/null >"$RESULTS/$stage.log" 2>&1
    rc=$?
    ((rc == 0)) || failed=$((failed + 1))
  fi
  "$PYTHON" bench/gpu/summary.py "$RESULTS" "$stage" "$rc" "$limit" "$start" "$EPOCHREALTIME"
  keep
done <<<"$STAGES"

if [[ -n $POLLING ]]; then
  cp "$RESULTS.clocks" "$RESULTS/clocks.csv"
  "$PYTHON" bench/gpu/clocks.py "$RESULTS"
fi
for table in $TABLES; do
  [[ ! -e $RESULTS/$table ]] || { echo; cat "$RESULTS/$table"; }
done
echo
"$PYTHON" bench/gpu/targets.py "$RESULTS" 2>&1
keep
exit $failed
