#!/usr/bin/env bash
# A Ray node of one's own on this machine: its own ports and folder, so that it disturbs no other
# Ray and is disturbed by none. The dashboard (and with it `ray job submit`) listens on loopback
# only, and Ray's token authentication is on.
#
#   launch/local_cluster.sh [RAY START OPTIONS]                     # a head: a cluster of one node
#   launch/local_cluster.sh --address=HOST:PORT [RAY START OPTIONS] # one more node of a cluster
#
# Options go to `ray start` as they are: --num-cpus=4 --num-gpus=1 --resources='{"small": 1}'.
# It prints how to use the cluster and how to stop the node: `kill PID`, which waits for its
# processes. Never `ray stop`: that ends every Ray of the machine.
#
# START_S (default 180) limits the start.
set -euo pipefail

ray=$(command -v ray) || {
    echo "no ray on PATH: activate the environment that rock_opd is installed in" >&2
    exit 1
}
bin=$(cd "$(dirname "$ray")" && pwd)
start_s=${START_S:-180}
# Ray gives a raylet 60 s and its agents 30 s, which a busy machine exceeds.
export RAY_raylet_start_wait_time_s=${RAY_raylet_start_wait_time_s:-$start_s}
export RAY_agent_register_timeout_ms=${RAY_agent_register_timeout_ms:-$((start_s * 1000))}
# Jobs find rock-opd where they find ray.
export PATH="$bin:$PATH"

address=
for option in "$@"; do
    case $option in --address=*) address=${option#--address=} ;; esac
done
folder=$(mktemp -d /tmp/rock_ray.XXXXXX) # short: socket paths have 107 characters at most
chmod 700 "$folder"
if [[ -z $address && -z ${RAY_AUTH_MODE:-} ]]; then
    "$bin/python" -c 'import secrets; print(secrets.token_hex(32), end="")' >"$folder/token"
    chmod 600 "$folder/token"
    export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH=$folder/token
fi

free_ports() { # so many ports that are free now
    "$bin/python" - "$1" <<'PY'
import socket, sys
held = [socket.socket() for _ in range(int(sys.argv[1]))]
for each in held:
    each.bind(("127.0.0.1", 0))
print(*(each.getsockname()[1] for each in held))
PY
}

answers() { # whether someone listens on a loopback port
    (exec 3<>"/dev/tcp/127.0.0.1/$1") 2>/dev/null
}

for attempt in 1 2 3; do
    options=(--block --temp-dir="$folder/ray" --disable-usage-stats
        --dashboard-agent-listen-port=0 --dashboard-agent-grpc-port=0 --metrics-export-port=0)
    if [[ -z $address ]]; then
        read -r gcs dashboard client < <(free_ports 3)
        options+=(--head --port="$gcs" --dashboard-host=127.0.0.1 --dashboard-port="$dashboard"
            --ray-client-server-port="$client")
    fi
    setsid nohup "$ray" start "${options[@]}" "$@" >"$folder/ray.log" 2>&1 </dev/null &
    pid=$!
    deadline=$((SECONDS + start_s))
    while kill -0 "$pid" 2>/dev/null && ((SECONDS < deadline)); do
        if grep -q 'Ray runtime started' "$folder/ray.log" &&
            { [[ -n $address ]] || answers "$dashboard"; }; then
            up=yes
            break 2
        fi
        sleep 0.3
    done
    kill "$pid" 2>/dev/null || true
    wait "$pid" 2>/dev/null || true
    if [[ -n $address ]] || ! grep -qi 'address already in use\|port.*in use' "$folder/ray.log"; then
        break
    fi
    echo "a port was taken meanwhile; once more on others (attempt $attempt of 3)" >&2
done
if [[ -z ${up:-} ]]; then
    echo "Ray did not start in $start_s s (START_S); the end of $folder/ray.log:" >&2
    tail -n 15 "$folder/ray.log" >&2
    exit 1
fi

if [[ -z $address ]]; then
    host=$("$bin/python" -c 'import ray; print(ray.util.get_node_ip_address())')
    {
        echo "export RAY_ADDRESS=$host:$gcs"
        echo "export RAY_API_SERVER_ADDRESS=http://127.0.0.1:$dashboard"
        echo "export RAY_AUTH_MODE=$RAY_AUTH_MODE"
        [[ -z ${RAY_AUTH_TOKEN_PATH:-} ]] || echo "export RAY_AUTH_TOKEN_PATH=$RAY_AUTH_TOKEN_PATH"
    } >"$folder/cluster.env"
    echo "a Ray cluster of one node is up. To use it:"
    echo "  source $folder/cluster.env"
    echo "One more node: launch/local_cluster.sh --address=$host:$gcs, after the line above"
else
    echo "a node has joined $address"
fi
echo "To stop it:"
echo "  kill $pid"
echo "Its logs: $folder"
