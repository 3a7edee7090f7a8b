#!/bin/sh
# Real Slurm for the tests, from Debian's packages. Installs what is missing when run as root; else says what to install.
set -eu
PACKAGES="slurm-wlm slurm-wlm-basic-plugins slurm-wlm-mysql-plugin slurmdbd munge mariadb-server iproute2"
PATH=$PATH:/usr/sbin:/sbin
missing=
for program in slurmctld slurmd slurmdbd srun munged mariadbd ss; do
    command -v $program >/dev/null 2>&1 || missing="$missing $program"
done
[ -z "$missing" ] && exit 0
echo "missing:$missing"
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null 2>&1; then
    echo "install these packages, then call make again: $PACKAGES" >&2
    exit 1
fi
apt-get update -qq
DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $PACKAGES >/dev/null
