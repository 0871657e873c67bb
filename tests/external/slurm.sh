#!/usr/bin/env bash
# The job array of deploy/slurm on a Slurm of one machine: its merged statistics are those of one run.
#
#   sudo tests/external/slurm.sh WUSH
#
# Needs root, and Debian's slurmctld, slurmd, slurm-client and munge: installed if apt-get is there. Skips loudly (exit code 77) where
# that is impossible. Starts its own daemons with their state in a temporary directory, and ends them.
set -euo pipefail
cd "$(dirname "$0")/../.."
wush=$(realpath "${1:?usage: slurm.sh WUSH}")

skip() { echo "SKIPPED: $*" >&2; exit 77; }
[ "$(id -u)" = 0 ] || skip "the daemons of Slurm need root"
if ! command -v slurmctld >/dev/null; then
    command -v apt-get >/dev/null || skip "no slurmctld and no apt-get"
    DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends slurmctld slurmd slurm-client munge >/dev/null || skip "apt-get could not install Slurm"
fi

dir=$(mktemp -d)
pids=()
end() {
    for pid in "${pids[@]}"; do kill "$pid" 2>/dev/null || true; done
    wait 2>/dev/null || true
    rm -rf "$dir"
}
trap end EXIT

mkdir -p "$dir/munge" "$dir/state" "$dir/spool" "$dir/run"
chmod 755 "$dir"
chown -R munge "$dir/munge"
chmod 700 "$dir/munge"
head -c 128 /dev/urandom >"$dir/munge/key"
chown munge "$dir/munge/key"
chmod 400 "$dir/munge/key"
# Its socket's directory must be open to others.
mkdir "$dir/socket" && chown munge "$dir/socket" && chmod 755 "$dir/socket"
runuser -u munge -- munged --foreground --key-file="$dir/munge/key" --socket="$dir/socket/munge" --pid-file="$dir/munge/pid" \
    --log-file="$dir/munge/log" --seed-file="$dir/munge/seed" >"$dir/munged.out" 2>&1 &
pids+=($!)

host=$(hostname -s)
port=$((20000 + RANDOM % 20000))
cat >"$dir/slurm.conf" <<EOF
ClusterName=test
SlurmctldHost=$host(127.0.0.1)
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket=$dir/socket/munge
CredType=cred/munge
SlurmctldPort=$port
SlurmdPort=$((port + 1))
StateSaveLocation=$dir/state
SlurmdSpoolDir=$dir/spool
SlurmctldPidFile=$dir/run/slurmctld.pid
SlurmdPidFile=$dir/run/slurmd.pid
SlurmctldLogFile=$dir/slurmctld.log
SlurmdLogFile=$dir/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
ReturnToService=2
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
NodeName=$host NodeAddr=127.0.0.1 CPUs=$(nproc) State=UNKNOWN
PartitionName=all Nodes=$host Default=YES MaxTime=INFINITE State=UP
EOF
export SLURM_CONF=$dir/slurm.conf
slurmctld -D >"$dir/ctld.out" 2>&1 &
pids+=($!)
slurmd -D >"$dir/slurmd.out" 2>&1 &
pids+=($!)
for _ in $(seq 60); do
    sinfo -h -o %T 2>/dev/null | grep -q idle && break
    sleep 1
done
sinfo -h -o %T | grep -q idle || { cat "$dir"/*.log >&2; echo "error: Slurm did not start" >&2; exit 1; }

model=$PWD/tests/fixtures/demo-model
options=(--calib "$model/calibration.txt" --sequences 10 --seq-len 512 --device cpu)
"$wush" calibrate "$model" "${options[@]}" --out "$dir/one.safetensors" --quiet >/dev/null
same=$PWD/tests/external/same_statistics.py
cd "$dir"
deploy=$OLDPWD/deploy/slurm
export WUSH=$wush
id=$(sbatch --parsable --array=1-3 "$deploy/calibrate.sbatch" "$model" "$dir/parts" "${options[@]}")
sbatch --wait --dependency="afterok:$id" "$deploy/merge.sbatch" "$dir/parts" 3 >/dev/null || { cat "$dir"/*.log >&2; exit 1; }
# A second submission makes no part again.
sbatch --wait --array=1-3 "$deploy/calibrate.sbatch" "$model" "$dir/parts" "${options[@]}" >/dev/null
[ "$(cat "$dir"/wush-calibrate-*.log | grep -c 'is there already')" = 3 ] || { cat "$dir"/*.log >&2; echo "error: a part was made again" >&2; exit 1; }
python3 "$same" "$dir/one.safetensors" "$dir/parts/stats.safetensors"
