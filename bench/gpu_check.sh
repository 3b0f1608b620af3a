#!/usr/bin/env bash
# Everything that needs a GPU, in one command: seven minutes with an H100 and 16 cores.
#
#   bench/gpu_check.sh OUT [STAGE...]
#
# OUT      folder for the results; made if it is not there:
#            summary.json     of every stage: exit status, seconds, one line that says what came out
#            STAGE.log        all that the stage printed
#            environment.json, bench.json, bench.md, conformance_*.xml
# STAGE    run only these, in the order of the table below (a build must have gone before)
#
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
environment                  20   python bench/gpu/environment.py $OUT
build                        60   python bench/gpu/build.py
conformance_cuda            130   python bench/gpu/conformance.py cuda $OUT
conformance_triton          150   python bench/gpu/conformance.py triton $OUT
gradients                    15   python bench/gpu/gradients.py
graphs                       15   python bench/gpu/graphs.py
compile                      45   python bench/gpu/compile.py
layer                        90   python bench/gpu/layer.py
streams                      15   python bench/gpu/streams.py
sanitizer_memcheck           10   sanitizer memcheck
sanitizer_racecheck          10   sanitizer racecheck
sanitizer_initcheck          10   sanitizer initcheck
sanitizer_synccheck          10   sanitizer synccheck
large                        15   python bench/gpu/large.py
bench                        70   python bench/gpu/bench.py $OUT --seconds 60
'

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
export OUT PATH PYTHON ${CUDA_HOME:+CUDA_HOME} PYTHONUNBUFFERED=1

for stage in "$@"; do
  grep -q "^$stage " <<<"$STAGES" || { echo "gpu_check.sh: no stage $stage; --help tells" >&2; exit 2; }
done

rm -f "$OUT/summary.json"
failed=0
while read -r stage limit command; do
  [[ -z $stage || ($# -gt 0 && " $* " != *" $stage "*) ]] && continue
  start=$EPOCHREALTIME
  timeout --signal INT --kill-after 10 "$limit" "$BASH" "$SELF" --stage "$command" </dev/null >"$OUT/$stage.log" 2>&1
  rc=$?
  ((rc == 0)) || failed=$((failed + 1))
  "$PYTHON" bench/gpu/summary.py "$OUT" "$stage" "$rc" "$limit" "$start" "$EPOCHREALTIME"
done <<<"$STAGES"
exit $failed
