#!/usr/bin/env bash
# One node of a toolrl cluster, for every launcher.
#
#   toolrl-node head NODES FLAGS… -- COMMAND…   Ray's head; once NODES nodes are there, the command; ends with its exit code
#   toolrl-node worker HEAD FLAGS…              joins the head's Ray, again if need be; ends when the head is gone
#
# The flags are those of `ray start`. Ray's port is $TOOLRL_RAY_PORT. Its dashboard and the port for jobs stay on the
# loopback. Ray's files lie in a folder of $TOOLRL_RAY_FILES (/tmp), which goes with the node. RAY_AUTH_MODE and
# RAY_AUTH_TOKEN_PATH are Ray's own. A node ends its own Ray only, whatever else runs beside it.
set -euo pipefail
# Said to `ray start` and the run alike: without it, the one takes a token of its own making, the other none.
export RAY_AUTH_MODE=${RAY_AUTH_MODE:-disabled}
# Whoever ends a node does not wait for what still runs there: nobody would wait half a minute.
export RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S=0

port=${TOOLRL_RAY_PORT:-6379}
patience_s=${TOOLRL_JOIN_DEADLINE_S:-600}
role=${1:?head or worker}
shift
# Sockets lie there, so the path has to be short. Nodes that were killed have left theirs; a node that lives holds its lock.
place=${TOOLRL_RAY_FILES:-/tmp}
mkdir -p "$place"
for left in "$place"/toolrl-ray-*; do
    [ ! -O "$left/lock" ] || flock --nonblock "$left/lock" rm -rf "$left" || true
done
new=$(mktemp -d "$place/toolrl-new-XXXXXX")
exec 9>"$new/lock"
flock 9
files=$place/toolrl-ray-${new##*-}
mv "$new" "$files"
started=
ray_flags=(--disable-usage-stats --block --temp-dir="$files")

end() { # a process of ours, in a moment: what looks for a Ray that has gone hears nothing
    kill -TERM "$1" 2>/dev/null || true
    for _ in $(seq 50); do
        kill -0 "$1" 2>/dev/null || break
        sleep 0.2
    done
    kill -KILL "$1" 2>/dev/null || true
    wait "$1" 2>/dev/null || true
}
finish() {
    [ -z "$started" ] || end "$started"
    rm -rf "$files"
}
trap finish EXIT

case $role in
head)
    nodes=${1:?how many nodes there are to be}
    shift
    flags=()
    while [ "${1:?no -- before the command}" != -- ]; do
        flags+=("$1")
        shift
    done
    shift
    # The address that the other nodes see.
    address=${TOOLRL_NODE_ADDRESS:-$(hostname -i | cut -d' ' -f1)}
    running=
    told=0
    # A stop reaches what is run now: the run writes a checkpoint.
    trap 'told=$((told + 1)); [ -z "$running" ] || kill -TERM "$running" 2>/dev/null || true' TERM INT
    run() { # a command to its end or Ray's, whatever signals come; sets `code`, to 1 where Ray ended first
        "$@" &
        running=$!
        [ "$told" = 0 ] || kill -TERM "$running" 2>/dev/null || true
        local heard=-1
        while [ "$heard" != "$told" ]; do
            heard=$told
            code=0
            wait -n "$running" "$started" || code=$?
        done
        if kill -0 "$running" 2>/dev/null; then
            code=1
            echo "toolrl-node: Ray ended on the head" >&2
            end "$running"
        fi
        running=
    }
    # Another Ray may run on this machine: the command joins this one.
    export RAY_ADDRESS=$address:$port
    # Ray gives itself half a minute to start, and a part of it a minute, which is too little for a busy machine.
    for _ in 1 2 3; do
        ray start --head --port="$port" --node-ip-address="$address" --dashboard-host=127.0.0.1 \
            "${ray_flags[@]}" "${flags[@]}" &
        started=$!
        run python -m toolrl.app.launch.wait_for_nodes "$nodes" "$patience_s"
        if [ "$told" -gt 0 ]; then
            echo "toolrl-node: told to end before there was a cluster" >&2
            exit 0
        fi
        # The nodes are there, or had their time to come.
        if [ "$code" = 0 ] || [ "$SECONDS" -ge "$patience_s" ]; then
            break
        fi
        end "$started"
    done
    [ "$code" = 0 ] || exit "$code"
    # Its exit code is this node's.
    run "$@"
    exit "$code"
    ;;
worker)
    head=${1:?the address of the head}
    shift
    # Ray finds the address that the head sees, unless it is said.
    [ -z "${TOOLRL_NODE_ADDRESS:-}" ] || ray_flags+=(--node-ip-address="$TOOLRL_NODE_ADDRESS")
    # A node that Ray gave up (cut off for too long, too slow to start) joins anew, as long as the head is there.
    trap 'exit 0' TERM INT
    in_background() { # a stop does not wait for it
        "$@" &
        started=$!
        local failed=0
        wait "$started" || failed=1
        started=
        return "$failed"
    }
    head_is_there() {
        in_background ray health-check --address "$head:$port" >/dev/null 2>&1
    }
    waited_s=0
    until head_is_there; do
        if [ "$waited_s" -ge "$patience_s" ]; then
            echo "toolrl-node: no Ray at $head:$port after $patience_s s" >&2
            exit 1
        fi
        sleep 1
        waited_s=$((waited_s + 1))
    done
    while true; do
        in_background ray start --address="$head:$port" "${ray_flags[@]}" "$@" ||
            echo "toolrl-node: Ray ended on this node" >&2
        head_is_there || exit 0
        sleep 1
    done
    ;;
*)
    echo "toolrl-node: unknown role $role; head or worker" >&2
    exit 2
    ;;
esac
