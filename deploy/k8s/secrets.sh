#!/bin/sh
# Makes the Secret that the manifests expect, with fresh values: deploy/k8s/secrets.sh [NAMESPACE]. Of one that is there what it
# has stays, and what it lacks is added (then restart Redis: kubectl rollout restart statefulset redis).
# For a Redis of your own set REDIS_URL, REDIS_WEB_SEARCH_URL, REDIS_WEB_FETCH_URL and REDIS_MCP_URL (all the same, if it knows one
# user only), REDIS_ADDRESS, REDIS_USER and REDIS_PASSWORD (the last three are KEDA's, which needs to read no entry: +info +xlen
# +xpending +xinfo|groups). The user of a Redis that has a password only is named default.
set -eu
umask 077
namespace=${1:-local2}
fresh() { od -An -N24 -tx1 /dev/urandom | tr -d ' \n'; }

# Half of a Redis elsewhere would be one that nobody reaches: an address of ours with a name of theirs.
outside='REDIS_URL REDIS_WEB_SEARCH_URL REDIS_WEB_FETCH_URL REDIS_MCP_URL REDIS_ADDRESS REDIS_USER REDIS_PASSWORD'
given='' lacking=''
for name in $outside; do
	if [ -n "$(printenv "$name" || true)" ]; then given="$given $name"; else lacking="$lacking $name"; fi
done
if [ -n "$given" ] && [ -n "$lacking" ]; then
	echo "A Redis of your own needs all of its names; these are not set:$lacking. The URLs may all be the same; the user of a" \
		"Redis that has a password only is named default." >&2
	exit 2
fi
for url in ${REDIS_URL:-} ${REDIS_WEB_SEARCH_URL:-} ${REDIS_WEB_FETCH_URL:-} ${REDIS_MCP_URL:-}; do
	case $url in
	*://?*:?*@?*) ;;
	*)
		echo "A URL of Redis has a user and a password: rediss://default:PASSWORD@HOST:PORT/0, not ${url%%://*}://…" >&2
		exit 2
		;;
	esac
done

password=$(fresh)
search_password=$(fresh)
fetch_password=$(fresh)
mcp_password=$(fresh)
values() { # KEY VALUE, a line each
	cat <<LINES
redis-url ${REDIS_URL:-redis://core:$password@redis:6379/0}
redis-web-search-url ${REDIS_WEB_SEARCH_URL:-redis://web_search:$search_password@redis:6379/0}
redis-web-fetch-url ${REDIS_WEB_FETCH_URL:-redis://web_fetch:$fetch_password@redis:6379/0}
redis-mcp-url ${REDIS_MCP_URL:-redis://mcp:$mcp_password@redis:6379/0}
redis-address ${REDIS_ADDRESS:-redis.$namespace.svc:6379}
scaler-user ${REDIS_USER:-scaler}
scaler-password ${REDIS_PASSWORD:-$(fresh)}
redis-password $password
redis-web-search-password $search_password
redis-web-fetch-password $fetch_password
redis-mcp-password $mcp_password
admin-key ${LOCAL2_ADMIN_KEY:-l2_$(fresh)}
searxng-secret $(fresh)
LINES
}

kubectl get namespace "$namespace" >/dev/null 2>&1 || kubectl create namespace "$namespace"
there=$(kubectl --namespace "$namespace" get secret local2 --ignore-not-found \
	--output 'go-template={{range $key, $_ := .data}}{{$key}}{{"\n"}}{{end}}')
# A URL holds the password of its own user: one that is there without the other is of no use.
for user in web-search web-fetch mcp; do
	url=$(echo "$there" | grep -cx "redis-$user-url" || true)
	secret=$(echo "$there" | grep -cx "redis-$user-password" || true)
	if [ -z "${REDIS_URL:-}" ] && [ "$url" != "$secret" ]; then
		echo "The Secret local2 has one of redis-$user-url and redis-$user-password: take it out" \
			"(kubectl --namespace $namespace edit secret local2), and both are made anew." >&2
		exit 1
	fi
done
missing=$(values | while read -r key value; do
	echo "$there" | grep -qx "$key" || printf '  %s: "%s"\n' "$key" "$value"
done)
if [ -z "$there" ]; then
	printf 'apiVersion: v1\nkind: Secret\nmetadata:\n  name: local2\nstringData:\n%s\n' "$missing" |
		kubectl --namespace "$namespace" create --filename -
elif [ -n "$missing" ]; then
	printf 'stringData:\n%s\n' "$missing" >"${TMPDIR:-/tmp}/local2-secret.$$"
	trap 'rm -f "${TMPDIR:-/tmp}/local2-secret.$$"' EXIT
	kubectl --namespace "$namespace" patch secret local2 --type merge --patch-file "${TMPDIR:-/tmp}/local2-secret.$$"
	echo "Added:$(echo "$missing" | sed 's/:.*//' | tr '\n' ' ' | tr -s ' ')"
else
	echo 'The Secret local2 has everything'
fi
