#!/usr/bin/env bash
# Installs and starts PostgreSQL and Redis on a bare Debian, for the tests; does nothing where both already answer.
set -euo pipefail

postgres_up() { command -v pg_isready >/dev/null && pg_isready -q -h 127.0.0.1 -p 5432; }
redis_up() { command -v redis-cli >/dev/null && [ "$(redis-cli -h 127.0.0.1 -p 6379 ping 2>/dev/null)" = PONG ]; }

wait_for() { # name, probe
    for _ in $(seq 50); do "$2" && return 0; sleep 0.2; done
    echo "$1 did not answer within 10 s." >&2
    return 1
}

postgres_up && redis_up && exit 0
as_root() { if [ "$(id -u)" = 0 ]; then "$@"; else sudo "$@"; fi; }

if ! command -v pg_ctlcluster >/dev/null || ! command -v redis-server >/dev/null; then
    as_root apt-get update -qq
    as_root env DEBIAN_FRONTEND=noninteractive apt-get install -qq -y postgresql redis-server >/dev/null
fi
if ! postgres_up; then
    version=$(ls /etc/postgresql | sort -n | tail -n 1)
    as_root pg_ctlcluster --skip-systemctl-redirect "$version" main start || true
    wait_for PostgreSQL postgres_up
fi
if ! redis_up; then
    redis-server --daemonize yes --bind 127.0.0.1 --port 6379 --save '' --appendonly no >/dev/null
    wait_for Redis redis_up
fi

# The tests connect as the superuser of SUFFICE_TEST_POSTGRES_URL; a fresh cluster has only peer authentication.
if ! psql -h 127.0.0.1 -U postgres -d postgres -qAtc 'select 1' >/dev/null 2>&1; then
    hba=$(as_root su postgres -c "psql -qAtc 'show hba_file'")
    as_root sed -i '1i host all all 127.0.0.1/32 trust' "$hba"
    as_root su postgres -c "psql -qc 'select pg_reload_conf()'" >/dev/null
fi
