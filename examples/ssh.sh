#!/bin/bash
# A run on hosts that ssh reaches without a password, and that have the package, this directory and the graph at the same
# paths (shared storage, or copies):
#
#   cd examples && ./ssh.sh "host1 host2" --config configs/local_sgd.yaml
#
# Ctrl-C, or a SIGTERM to this script, stops all ranks together, with a checkpoint; so does a connection that breaks.
set -euo pipefail

read -ra hosts <<< "$1"
shift
ranks=${RANKS_PER_HOST:-2}

# What runs on a host. The end of its input tells it to stop.
on_host='
cd "$1"; shift
exec 3<&0
torchrun "$@" < /dev/null 3<&- &
torchrun=$!
{ cat <&3; kill -TERM "$torchrun"; } > /dev/null 2>&1 &
watcher=$!
code=0; wait "$torchrun" || code=$?
kill "$watcher" 2> /dev/null
exit "$code"'

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
mkfifo "$folder/input"
exec 3<> "$folder/input"  # the hosts go on as long as this is open
stop() { exec 3>&-; }
trap stop INT TERM

pids=()
for rank in "${!hosts[@]}"; do
    launch=(--nnodes "${#hosts[@]}" --node-rank "$rank" --nproc-per-node "$ranks")
    launch+=(--master-addr "${hosts[0]}" --master-port "${MASTER_PORT:-29500}" -m lightning_gnn_dist fit "$@")
    launch+=(--trainer.num_nodes="${#hosts[@]}" --trainer.devices="$ranks")
    command=(env OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" bash -c "$on_host" bash "$PWD" "${launch[@]}")
    ssh -- "${hosts[rank]}" "$(printf '%q ' "${command[@]}")" < "$folder/input" 3>&- &
    pids+=($!)
done

code=0
for pid in "${pids[@]}"; do
    status=0
    wait "$pid" || status=$?
    while kill -0 "$pid" 2> /dev/null; do  # a signal to this script ended the waiting, not the host
        status=0
        wait "$pid" || status=$?
    done
    if ((status)); then code=$status; stop; fi
done
exit "$code"
