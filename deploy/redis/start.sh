#!/bin/sh
# Starts the bus's server with the users of users.acl. Their passwords come from the environment, and stand in a file
# that only the server's user can read; further arguments go to the server, and win.
set -eu
umask 077
here=$(dirname "$0")
users=${TMPDIR:-/tmp}/users.acl

# One user for each tool worker that touches the outside: LOCAL2_REDIS_WEB_SEARCH_PASSWORD is for web_search.
tools=$(env | sed -n 's/^\(LOCAL2_REDIS_WEB_[A-Z0-9_][A-Z0-9_]*_PASSWORD\)=.*/\1/p' | sort | tr '\n' ' ')
for name in LOCAL2_REDIS_PASSWORD $tools; do
	value=$(printenv "$name" || true)
	case $value in
	'' | *[!A-Za-z0-9]*)
		echo "$name must be made of letters and digits, at least one: it becomes part of a URL" >&2
		exit 1
		;;
	esac
done
for user in scaler mcp; do
	name=LOCAL2_REDIS_$(echo $user | tr a-z A-Z)_PASSWORD
	case $(printenv "$name" || true) in
	*[!A-Za-z0-9]*)
		echo "$name must be made of letters and digits; without it there is no user $user" >&2
		exit 1
		;;
	esac
done
if [ -n "$(for name in $tools; do printenv "$name"; done | sort | uniq -d)" ]; then
	echo "two of these are the same, so that whoever takes over one tool worker can be the other: $tools" \
		"(make env adds to .env what is missing there)" >&2
fi

prefix=${LOCAL2_KEY_PREFIX:-local2:}
if ! printf '%s' "$prefix" | grep -Eqx '[A-Za-z0-9_.-]+:|\{[A-Za-z0-9_.-]+\}:'; then
	echo "LOCAL2_KEY_PREFIX is '$prefix'; set it to a name and a colon, such as local2: (the default), or {local2}:" >&2
	exit 1
fi

# One line per user, without comments; the passwords never appear in a command line.
awk -v tools="$tools" -v prefix="$prefix" '
	function write_user(rules, user, password) {
		gsub("local2:", prefix, rules)
		gsub("WEB_TOOL", user, rules)
		gsub("TOOL_PASSWORD", password, rules)
		printf "%s\n", rules
	}
	function left_out(user) {
		return rules ~ "^user " user " " && ENVIRON["LOCAL2_REDIS_" toupper(user) "_PASSWORD"] == ""
	}
	function end_user(  names, count, at, user) {
		if (rules ~ /^user WEB_TOOL /) {
			count = split(tools, names, " ")
			for (at = 1; at <= count; at++) {
				user = tolower(names[at])
				gsub(/^local2_redis_|_password$/, "", user)
				write_user(rules, user, ENVIRON[names[at]])
			}
		} else if (rules != "" && !left_out("scaler") && !left_out("mcp")) {
			write_user(rules, "", "")
		}
	}
	/^#/ || /^[ \t]*$/ { next }
	{ gsub("SCALER_PASSWORD", ENVIRON["LOCAL2_REDIS_SCALER_PASSWORD"]); gsub("CORE_PASSWORD", ENVIRON["LOCAL2_REDIS_PASSWORD"]) }
	{ gsub("MCP_PASSWORD", ENVIRON["LOCAL2_REDIS_MCP_PASSWORD"]) }
	/^[ \t]/ { rules = rules " " $0; next }
	{ end_user(); rules = $0 }
	END { end_user() }
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
