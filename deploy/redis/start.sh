#!/bin/sh
# Starts the bus's server with the users of users.acl. Their passwords come from the environment, and stand in a file
# that only the server's user can read; further arguments go to the server.
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

# One line per user, without comments; the passwords never appear in a command line.
awk '
	/^#/ || /^[ \t]*$/ { next }
	{ gsub("CORE_PASSWORD", ENVIRON["LOCAL2_REDIS_PASSWORD"]); gsub("WEB_PASSWORD", ENVIRON["LOCAL2_REDIS_WEB_PASSWORD"]) }
	/^[ \t]/ { printf " %s", $0; next }
	{ printf "%s%s", separator, $0; separator = "\n" }
	END { print "" }
' "$here/users.acl" >"$users"

exec redis-server "$here/redis.conf" --aclfile "$users" "$@"
