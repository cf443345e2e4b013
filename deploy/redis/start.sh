#!/bin/sh
# Starts the bus's server with the users of users.acl. Their passwords come from the environment, and stand in a file
# that only the server's user can read; further arguments go to the server, and win.
set -eu
umask 077
here=$(dirname "$0")
users=${TMPDIR:-/tmp}/users.acl

for name in LOCAL2_REDIS_PASSWORD LOCAL2_REDIS_WEB_PASSWORD; do
	value=$(printenv "$name" || true)
	case $value in
	'' | *[!A-Za-z0-9]*)
		echo "$name must be made of letters and digits, at least one: it becomes part of a URL" >&2
		exit 1
		;;
	esac
done
case ${LOCAL2_REDIS_SCALER_PASSWORD:-} in
*[!A-Za-z0-9]*)
	echo "LOCAL2_REDIS_SCALER_PASSWORD must be made of letters and digits; without it there is no user scaler" >&2
	exit 1
	;;
esac

# One line per user, without comments; the passwords never appear in a command line.
awk '
	/^#/ || /^[ \t]*$/ { next }
	/^user / { left_out = $2 == "scaler" && ENVIRON["LOCAL2_REDIS_SCALER_PASSWORD"] == "" }
	left_out { next }
	{ gsub("SCALER_PASSWORD", ENVIRON["LOCAL2_REDIS_SCALER_PASSWORD"]) }
	{ gsub("CORE_PASSWORD", ENVIRON["LOCAL2_REDIS_PASSWORD"]); gsub("WEB_PASSWORD", ENVIRON["LOCAL2_REDIS_WEB_PASSWORD"]) }
	/^[ \t]/ { printf " %s", $0; next }
	{ printf "%s%s", separator, $0; separator = "\n" }
	END { print "" }
' "$here/users.acl" >"$users"

# Above its own limit the server refuses writes; above the container's it would be killed. The other half is for
# rewriting the append-only file.
limit=$(cat /sys/fs/cgroup/memory.max 2>/dev/null || cat /sys/fs/cgroup/memory/memory.limit_in_bytes 2>/dev/null || echo max)
case $limit in
# no limit, in the words of either version of control groups
'' | *[!0-9]* | ????????????????*) half=0 ;;
*) half=$((limit / 2)) ;;
esac

exec redis-server "$here/redis.conf" --aclfile "$users" --maxmemory "${LOCAL2_REDIS_MAXMEMORY:-$half}" "$@"
