#!/bin/sh
# `make backup FILE=…`: everything that the running containers keep, as one file of this machine (docs/backup.md).
set -eu
umask 077
cd "$(dirname "$0")/.."
file=${1:?name the file: make backup FILE=local2.backup}
[ ! -e "$file" ] || { echo "$file is there already: choose another name" >&2; exit 1; }
trap 'rm -f "$file.part"' EXIT
# The gateway's own file system can be written on its volume only, and what it says goes apart from what it sends.
docker compose exec -T gateway sh -c '
	trap "rm -f /data/out.backup" EXIT
	local2 backup --force /data/out.backup >&2 && cat /data/out.backup' >"$file.part"
# What came through is whole: its last line says so.
gzip -cd "$file.part" | tail -1 | grep -q '"complete"' || { echo "$file is not whole: try again" >&2; exit 1; }
mv "$file.part" "$file"
