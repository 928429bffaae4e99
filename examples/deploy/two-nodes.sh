#!/bin/sh
# One provider on two machines, each with half of the weights. Run on both, with the same provider.toml and checkpoint:
#
#     sh two-nodes.sh 0 10.0.0.1     # on 10.0.0.1, which listens at the address in provider.toml
#     sh two-nodes.sh 1 10.0.0.1     # on the other machine
#
# torch.distributed neither encrypts nor authenticates: 10.0.0.1 must be an address of a private network, and
# INTERFACE the name of the machines' interface to this network. With more GPUs per machine, set PER_NODE; with more
# machines, NODES. When one machine is lost, all commands fail: have systemd start them again (Restart=on-failure).
set -eu
node=$1 first=$2
interface=${INTERFACE:-eth0}
export GLOO_SOCKET_IFNAME="$interface" NCCL_SOCKET_IFNAME="$interface"
exec "${PYTHON:-python3}" -m provider.processes.launch --nnodes "${NODES:-2}" --node-rank "$node" \
    --nproc-per-node "${PER_NODE:-1}" --master-addr "$first" --master-port "${PORT:-29400}" \
    -m provider.processes.rank --config "${CONFIG:-provider.toml}"
