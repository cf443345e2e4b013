#!/bin/sh
# `make restore FILE=…`: puts a backup into the running containers (docs/backup.md); further arguments: --merge, --replace, …
set -eu
cd "$(dirname "$0")/.."
file=${1:?name the file: make restore FILE=local2.backup}
shift
[ -r "$file" ] || { echo "$file cannot be read" >&2; exit 1; }
docker compose exec -T gateway sh -c '
	trap "rm -f /data/in.backup" EXIT
	cat >/data/in.backup && local2 restore "$@" /data/in.backup' sh "$@" <"$file"
