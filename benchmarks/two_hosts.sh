#!/bin/bash
# Run torchrun on two hosts that are network namespaces of this machine, each with an address of its own and a cable
# between them whose bytes are counted. Needs Linux and root, and leaves nothing behind.
#
#   cd examples && ../benchmarks/two_hosts.sh -m lightning_gnn_dist fit --config configs/local_sgd.yaml \
#       --trainer.num_nodes=2 --trainer.devices=1
#
# RATE=1gbit limits what each host sends; RANKS_PER_HOST=2 starts more than one rank on each. With ROUND_TRIP=20 (ms) the
# cable is the wire of relay.py, RATE a number of Mbit/s, and LOSS the share of packets that are lost. CONGESTION=reno
# names how TCP answers to that, in place of the machine's way.
set -euo pipefail

network=10.77.$((RANDOM % 250)) name=gnn$$ pids=() relay=
cleanup() {
    for pid in "${pids[@]}" $relay; do kill "$pid" 2> /dev/null || true; done
    for host in 1 2; do ip netns delete "$name-$host" 2> /dev/null || true; done
}
trap cleanup EXIT

for host in 1 2; do
    ip netns add "$name-$host"
    ip -n "$name-$host" link set lo up
    [ -z "${CONGESTION:-}" ] || ip netns exec "$name-$host" sysctl -qw net.ipv4.tcp_congestion_control="$CONGESTION"
done
if [ -n "${ROUND_TRIP:-}" ]; then
    "${PYTHON:-python3}" "$(dirname "$0")/relay.py" "$name-1" "$name-2" --rate "${RATE:-100}" --loss "${LOSS:-0}" \
        --round_trip "$ROUND_TRIP" --addresses "$network.1" "$network.2" &
    relay=$!
    until ip -n "$name-2" link show cable up 2> /dev/null | grep -q cable; do kill -0 $relay; sleep 0.1; done
else
    ip link add cable netns "$name-1" type veth peer name cable netns "$name-2"
fi
for host in 1 2; do
    [ -z "${ROUND_TRIP:-}" ] || break
    ip -n "$name-$host" address add "$network.$host/24" dev cable
    ip -n "$name-$host" link set cable up
    if [ -n "${RATE:-}" ]; then
        ip netns exec "$name-$host" tc qdisc add dev cable root tbf rate "$RATE" burst 256k latency 50ms
    fi
done

for host in 1 2; do
    # What processes of one host share in memory, those of the other must not see.
    ip netns exec "$name-$host" unshare --mount sh -c 'mount -t tmpfs tmpfs /dev/shm && exec "$@"' host \
        env GLOO_SOCKET_IFNAME=cable "${PYTHON:-python3}" -m torch.distributed.run \
        --nnodes 2 --node-rank $((host - 1)) --nproc-per-node "${RANKS_PER_HOST:-1}" \
        --master-addr "$network.1" --master-port 29500 "$@" &
    pids+=($!)
done
for pid in "${pids[@]}"; do wait "$pid"; done
pids=()
sent=$(ip netns exec "$name-1" cat /sys/class/net/cable/statistics/tx_bytes)
received=$(ip netns exec "$name-1" cat /sys/class/net/cable/statistics/rx_bytes)
echo "host 1 sent $sent bytes and received $received"
